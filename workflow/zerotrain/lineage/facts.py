"""What is worth knowing of a folder: steps, presets, learning rate, numbers of samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from zerotrain.artifact import Artifact

LAUNCH = ("preset", "learning_rate", "lr_scheduler", "global_batch_size", "start_step",
          "until_step", "epoch_size", "resolution", "seed")  # fmt: skip
POSITION = ("run", "phase", "step", "samples", "optimizer")
CONTENT = {
    "weights": ("family", "step", "dtype", "ema"),
    "exported": ("to", "family", "step", "dtype", "ema"),
    "cache": ("resolution", "max_length", "dtype", "count"),
    "dataset": ("count", "repeats"),
    "base": ("base", "family", "commit"),
}
"""Keys of the content that are facts, by kind."""
COUNTS = ("step", "samples", "start_step", "until_step", "epoch_size")
"""Facts that are reckoned with."""
MADE_BY = ("run", "phase", "commit", "code")


def facts_of(folder: Artifact) -> dict[str, Any]:
    """The facts of a folder, by names that stay; what a damaged file would say is left out."""
    try:
        found = {key: folder.content.get(key) for key in CONTENT.get(folder.kind, ())}
        found |= {key: folder.made_by.get(key) for key in MADE_BY}
        found["preset"] = _of(folder.made_by.get("engine"), "preset")
        if folder.kind == "launch":
            resolved = yaml.load((folder.folder / "run.yaml").read_text(), yaml.CSafeLoader)
            found |= {key: _of(_of(resolved, key), "value") for key in LAUNCH}
        if folder.kind in ("checkpoint", "state"):
            position = _position(folder.folder / f"{folder.kind}.json")
            found |= {key: position.get(key) for key in POSITION}
            found["preset"] = _of(position.get("engine"), "preset")
            groups = position.get("param_groups") or [{}]
            found["learning_rate"] = _of(groups[0], "lr")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError):
        pass  # the files are held to the manifest elsewhere, and named there
    return {
        key: value
        for key, value in found.items()
        if value is not None and (key not in COUNTS or type(value) is int)
    }


def _position(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text())
    return found if isinstance(found, dict) else {}


def _of(found: Any, key: str) -> Any:
    return found.get(key) if isinstance(found, dict) else None
