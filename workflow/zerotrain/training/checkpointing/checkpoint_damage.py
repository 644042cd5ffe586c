"""Damage of a rolling checkpoint: what makes it useless, and what can be repaired.

Damaged records (the log, the resources used) are no reason to train the same steps again: they are
restored if the progress folder has them, else removed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerotrain import artifact
from zerotrain.artifact import MANIFEST, RECORDS, Artifact, replacing, write_json
from zerotrain.artifact.damage import find_damage
from zerotrain.errors import PipelineError
from zerotrain.state.position import read_position
from zerotrain.training.checkpointing.conditions import check_content
from zerotrain.training.reporting.validation_history import HISTORY

KIND = "checkpoint"
POSITION = "checkpoint.json"
NEEDED_RECORDS = frozenset((RECORDS + HISTORY,))
"""Records that training depends on: they decide when it ends, and which step is its best."""
LOSSES = {
    "metrics.jsonl": "the log of the run begins again at this step",
    "resources.json": "time and memory used before this step are not counted",
    "pending.json": "the next line of the log averages the steps after this one",
}
"""The consequence of losing each record."""


def read_intact(folder: Path) -> Artifact:
    """Read a checkpoint, and verify all of it except the records that no training depends on.

    Raises:
        PipelineError: a file is missing, differs, or is not listed.
    """
    manifest = artifact.read_manifest(folder, KIND)
    needed = [name for name in manifest.files if _is_needed(name)]
    manifest.verify(names=needed)
    for name in _names(folder):
        if _is_needed(name) and name not in manifest.files:
            raise PipelineError(
                f"{folder}: {name} is not listed in {MANIFEST}",
                hint="restore the folder from a copy, or remove it",
            )
    check_content(manifest)
    read_position(manifest, POSITION)
    return manifest


def repair_records(checkpoint: Artifact, log: Path) -> list[str]:
    """Restore or remove damaged records, so that the checkpoint is an intact folder again.

    Args:
        checkpoint: The checkpoint; its other files must be intact.
        log: The phase's metrics.jsonl, which begins with the checkpoint's log.

    Returns:
        A message for each damaged record.
    """
    folder = checkpoint.folder
    records = {name: entry for name, entry in checkpoint.files.items() if not _is_needed(name)}
    damaged = {damage.path for damage in find_damage(folder, records, None)}
    present = {name: entry for name, entry in records.items() if folder / name not in damaged}
    damaged |= {damage.path for damage in find_damage(folder, present)}
    damaged |= {folder / name for name in _names(folder) if name not in checkpoint.files}
    lines = []
    for path in sorted(damaged):
        entry = records.pop(path.relative_to(folder).as_posix(), None)
        if path.name == log.name and entry and _restore(path, log, entry):
            records[path.relative_to(folder).as_posix()] = entry
            lines.append(f"{path}: damaged, restored from {log}")
        else:
            path.unlink(missing_ok=True)
            lines.append(f"{path}: damaged, removed; {LOSSES.get(path.name, 'it is a record')}")
    if records.keys() != {name for name in checkpoint.files if not _is_needed(name)}:
        needed = {name: entry for name, entry in checkpoint.files.items() if _is_needed(name)}
        document = json.loads((folder / MANIFEST).read_text()) | {"files": needed | records}
        with replacing(folder / MANIFEST) as new:
            write_json(new, document)
    return lines


def _is_needed(name: str) -> bool:
    return not name.startswith(RECORDS) or name in NEEDED_RECORDS


def _names(folder: Path) -> list[str]:
    files = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in files if name != MANIFEST)


def _restore(path: Path, log: Path, entry: Mapping[str, Any]) -> bool:
    """Restore a checkpoint's log from the phase's; return False if that does not begin with it."""
    try:
        with log.open("rb") as stream:
            data = stream.read(entry["bytes"])
    except OSError:
        return False
    if hashlib.sha256(data).hexdigest() != entry["sha256"]:
        return False
    with replacing(path) as new:
        new.write_bytes(data)
    return True
