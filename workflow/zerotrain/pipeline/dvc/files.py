"""The files in which DVC keeps stages and hashes: dvc.yaml, dvc.lock and NAME.dvc.

A repository may be from somebody else, so they are checked here before DVC reads them: its parser
ends the process where values are nested too deeply.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Required

from typing_extensions import TypedDict

from zerotrain.artifact.documents import check_type, parse_yaml, read_text

PIPELINE = Path("dvc.yaml")
LOCK = Path("dvc.lock")
MOST_VALUES = 10_000_000
"""A stage has some hundreds."""
HINT = "take it from git again; do not use a repository if you do not know who made it"


class Entry(TypedDict, total=False):
    """An input or output of a stage."""

    path: Required[str]
    md5: str


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


def parse_lock(text: str, source: object = LOCK) -> dict[str, Stage]:
    """Return the stages of a dvc.lock, by name.

    Raises:
        DocumentError: it is no YAML, or has another structure than DVC writes.
    """
    found = parse_yaml(text, source, hint=HINT, most=MOST_VALUES, version="1.1")
    return check_type(found or {}, _Lock, source, hint=HINT).get("stages") or {}


def check_documents() -> None:
    """Check the files that DVC reads in this project.

    Raises:
        DocumentError: one of them is no YAML.
    """
    for path in _documents():
        read_document(path)


def _documents() -> Iterator[Path]:
    yield from (path for path in (PIPELINE, LOCK) if path.is_file())
    for pattern in ("*.dvc", "*/*.dvc"):
        yield from (path for path in sorted(Path().glob(pattern)) if path.is_file())
