"""Facts about a folder: steps, presets, learning rate, numbers of samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from zerotrain.artifact import RECORDS, Artifact
from zerotrain.errors import PipelineError
from zerotrain.state.ran_on import RanOn

LAUNCH = ("preset", "learning_rate", "lr_scheduler", "global_batch_size", "start_step",
          "until_step", "epoch_size", "resolution", "seed")  # fmt: skip
POSITION = ("run", "phase", "step", "samples", "optimizer")
CONTENT = {
    "weights": ("family", "step", "dtype", "ema"),
    "exported": ("to", "family", "step", "dtype", "ema"),
    "cache": ("resolution", "max_length", "dtype", "count"),
    "dataset": ("count", "repeats"),
    "base": ("base", "family", "commit", "file_sha256"),
}
"""Keys of the content that are facts, by kind."""
COUNTS = ("step", "samples", "start_step", "until_step", "epoch_size")
"""Facts that must be integers."""
MADE_BY = ("run", "phase", "commit", "code")
SOURCE = f"{RECORDS}made_by.json"
"""Of a checkpoint: commit and code of the source that published it."""
ENCODING = f"{RECORDS}encoding.json"
"""Of a cache: the software that encoded it; earlier versions did not write it."""


def facts_of(folder: Artifact) -> dict[str, Any]:
    """Return the facts about a folder under stable names; facts from damaged files are omitted."""
    try:
        found = {key: folder.content.get(key) for key in CONTENT.get(folder.kind, ())}
        made_by = source_of(folder)
        found |= {key: made_by.get(key) for key in MADE_BY}
        found["preset"] = _of(folder.made_by.get("engine"), "preset")
        if folder.kind == "launch":
            resolved = yaml.load(
                (folder.folder / "run.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader
            )
            found |= {key: _of(_of(resolved, key), "value") for key in LAUNCH}
        if folder.kind in ("checkpoint", "state"):
            position = _json(folder.folder / f"{folder.kind}.json")
            found |= {key: position.get(key) for key in POSITION}
            found["preset"] = _of(position.get("engine"), "preset")
            groups = position.get("param_groups") or [{}]
            found["learning_rate"] = _of(groups[0], "lr")
            found |= RanOn.of_manifest(position, 0).made_by()
        elif folder.kind == "cache" and ENCODING in folder.files:
            software = _of(_json(folder.folder / ENCODING), "software")
            found |= RanOn.of_encoding(software).made_by() if isinstance(software, dict) else {}
        else:
            found |= RanOn.of_manifest(folder.made_by, 0).made_by()
    except (OSError, ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError):
        pass  # verify compares the files with the manifest, and reports them
    return {
        key: value
        for key, value in found.items()
        if value is not None and (key not in COUNTS or type(value) is int)
    }


def source_of(folder: Artifact) -> dict[str, Any]:
    """Return the made_by of a folder, with commit and code from its records if it has them."""
    if SOURCE not in folder.files:  # earlier versions put them into the manifest
        return folder.made_by
    try:
        found = json.loads(folder.path(SOURCE).read_text(encoding="utf-8"))
    except (OSError, ValueError, PipelineError):
        return folder.made_by
    entries = found.items() if isinstance(found, dict) else ()
    return {**folder.made_by, **{key: value for key, value in entries if isinstance(value, str)}}


def _json(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text(encoding="utf-8"))
    return found if isinstance(found, dict) else {}


def _of(found: Any, key: str) -> Any:
    return found.get(key) if isinstance(found, dict) else None
