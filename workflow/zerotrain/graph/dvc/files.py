"""dvc.yaml and dvc.lock, in which DVC keeps stages and hashes: how they are read and written.

A repository may be from somebody else: whatever they hold, they are a value or one sentence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Required

import yaml
from typing_extensions import TypedDict

from zerotrain.artifact.documents import check_object, check_type, parse_yaml, read_text

PIPELINE = Path("dvc.yaml")
LOCK = Path("dvc.lock")
HEADER = "# Written by `zerotrain dvc generate`, which keeps stages, plots and keys of your own.\n"
MOST_VALUES = 10_000_000
"""A stage has some hundreds."""
HINT = "take it from git again; do not use a repository if you do not know who made it"


class Entry(TypedDict, total=False):
    """An input or output of a stage."""

    path: Required[str]
    md5: str
    size: int


class Stage(TypedDict, total=False):
    """A stage of a dvc.lock."""

    deps: list[Entry]
    params: dict[str, dict[str, Any]]
    outs: list[Entry]


class _Lock(TypedDict, total=False):
    stages: dict[str, Stage] | None


def read_document(path: Path, hint: str = HINT) -> Any:
    """Read a file of DVC.

    Raises:
        FileError: it is missing, or is a folder, a pipe or a device.
        DocumentError: it is no YAML.
    """
    text = read_text(path, follow_links=True, hint=hint)
    return parse_yaml(text, path, hint=hint, most=MOST_VALUES, version="1.1")


def parse_lock(text: str) -> dict[str, Stage]:
    """Return the stages of a dvc.lock, by name.

    Raises:
        DocumentError: it is no YAML, or has another structure than DVC writes.
    """
    found = parse_yaml(text, LOCK, hint=HINT, most=MOST_VALUES, version="1.1")
    return check_type(found or {}, _Lock, LOCK, hint=HINT).get("stages") or {}


def recorded_below(places: Iterable[Path]) -> tuple[int, int]:
    """Return the number and bytes of the outputs at these places that dvc.lock records.

    Raises:
        DocumentError: dvc.lock is damaged.
    """
    if not LOCK.is_file():
        return 0, 0
    stages = parse_lock(read_text(LOCK, follow_links=True))
    places = [*places]
    sizes = [
        out.get("size", 0)
        for stage in stages.values()
        for out in stage.get("outs", [])
        if "md5" in out and any(Path(out["path"]).is_relative_to(place) for place in places)
    ]
    return len(sizes), sum(sizes)


def load_pipeline(path: Path = PIPELINE) -> dict[str, Any]:
    """Read dvc.yaml.

    Raises:
        PipelineError: it is not valid YAML, or its stages have no names.
    """
    hint = f"remove {path}, and `zerotrain dvc generate` writes it"
    found = check_object(read_document(path, hint) or {}, path, hint=hint)
    check_object(found.get("stages") or {}, f"{path}: stages", hint=hint)
    return found


class _OneLine(dict[str, Any]):
    """A mapping that is written on one line where it fits."""


class _Dumper(yaml.SafeDumper):
    """Writes such mappings."""


_Dumper.add_representer(
    _OneLine,
    lambda dumper, value: dumper.represent_mapping(
        "tag:yaml.org,2002:map", value.items(), flow_style=True
    ),
)


def as_text(document: Mapping[str, Any]) -> str:
    """Return dvc.yaml as text, with a line for each output and each plot where they fit."""
    plots = [
        {name: _OneLine(one) if isinstance(one, dict) else one for name, one in plot.items()}
        if isinstance(plot, dict)
        else plot
        for plot in document["plots"]
    ]
    text = yaml.dump(
        {**document, "plots": plots},
        Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True,
    )  # fmt: skip
    return HEADER + text
