"""Progress that was trained with other values: moved next to the phase's progress, never removed.

progress.stale-<digest>      what was set aside, with set_aside.json: {"trains": ...}, the values
                             that replaced its own
progress.moving-<digest>     the same while it is being moved
progress.restoring-<digest>  one that is being moved back
accepted.json                in progress/: {"trains": ...}, the values that it may resume with
                             although it was trained with others

The next start completes an interrupted move.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zerotrain.artifact import digest, replacing, write_json
from zerotrain.errors import PipelineError
from zerotrain.training.checkpointing import conditions
from zerotrain.training.checkpointing.conditions import RecordedConditions
from zerotrain.training.checkpointing.progress_folder import saved_steps, step_folder

DAMAGED = "damaged-step-"
"""Prefix of a checkpoint that progress_folder has set aside."""
STALE, MOVING, RESTORING = "stale", "moving", "restoring"
SET_ASIDE = "set_aside.json"
ACCEPTED = "accepted.json"
ENVIRONMENT = "ZEROTRAIN_ACCEPTED"
"""Digest of the values that a command accepts for the single start that it makes."""


def read_recorded(progress: Path, until: int) -> tuple[int, RecordedConditions] | None:
    """Read what the checkpoint that a start would resume was trained with.

    Args:
        progress: Folder of a phase's progress.
        until: Last step of the phase; a checkpoint beyond it counts only if there is no other.

    Returns:
        Its step and its record. None if no checkpoint can be read.
    """
    steps = sorted(saved_steps(progress), key=lambda step: (step <= until, step), reverse=True)
    for step in steps:
        try:
            return step, conditions.read_conditions(step_folder(progress, step))
        except (PipelineError, OSError):
            continue  # a resume skips damaged ones, too
    return None


def is_moving(progress: Path) -> bool:
    """Return whether a move was interrupted, so that the folder lacks some of its content."""
    return any(progress.parent.glob(f"{progress.name}.[mr]*-*"))


def set_aside(progress: Path, present: Mapping[str, Any]) -> Path:
    """Move what a progress folder holds, except for its lock, next to it.

    Args:
        progress: Folder of a phase's progress, whose lock is held.
        present: What the phase trains now, the reason for the move.

    Returns:
        The folder that holds it now.

    Raises:
        DiskError: nothing can be written, and nothing was moved.
    """
    _write(progress / SET_ASIDE, present)
    recorded = read_recorded(progress, 0)
    of = recorded[1].trains if recorded else {}
    moving = _unused_name(progress, MOVING, digest(of)[:TEXT])
    moving.mkdir()
    return _complete_aside(progress, moving)


def take_back(progress: Path, stale: Path) -> None:
    """Move what was set aside into a progress folder that holds no checkpoint, whose lock is held.

    Other files of the folder, such as the log of a start that saved nothing, are removed; damaged
    checkpoints are moved into a folder `progress.damaged-*`.
    """
    damaged = sorted(progress.glob(f"{DAMAGED}*"))
    if damaged:
        kept = _unused_name(progress, "damaged", "steps")
        kept.mkdir()
        for item in damaged:
            item.rename(kept / item.name)
    for item in _items(progress):
        shutil.rmtree(item) if item.is_dir() and not item.is_symlink() else item.unlink()
    restoring = _unused_name(progress, RESTORING, stale.name.partition("-")[2])
    stale.rename(restoring)
    _complete_restoring(progress, restoring)


def next_aside_folder(phase: Path) -> Path:
    """Return the folder that a phase's trained folders are moved into next; it does not exist.

    Args:
        phase: results/RUN/PHASE.
    """
    number = 1
    while (aside := phase / f"before-retrain-{number}").exists():
        number += 1
    return aside


def restore_command(phase: Path, aside: Path) -> str:
    """Return a shell command that restores what was moved into a folder of `next_aside_folder`.

    What was trained since is kept, in a folder `*-replaced`.
    """
    replaced = aside.with_name(f"{aside.name}-replaced")
    folder, former, since = (shlex.quote(str(one)) for one in (phase, aside, replaced))
    now = " ".join(f"{folder}/{part}" for part in ("checkpoint", "progress"))
    return f"mkdir {since}; mv {now} {since}/; mv {former}/* {folder}/"


def complete_moves(progress: Path) -> None:
    """Complete the moves of a process that was killed. The lock is held."""
    for moving in sorted(progress.parent.glob(f"{progress.name}.{MOVING}-*")):
        _complete_aside(progress, moving)
    for restoring in sorted(progress.parent.glob(f"{progress.name}.{RESTORING}-*")):
        _complete_restoring(progress, restoring)


def stale_folders(progress: Path) -> list[Path]:
    """Return the set-aside folders that have checkpoints, the newest last."""
    folders = progress.parent.glob(f"{progress.name}.{STALE}-*")
    return sorted((one for one in folders if saved_steps(one)), key=lambda one: one.stat().st_mtime)


def find_matching(progress: Path, until: int, present: Mapping[str, Any]) -> Path | None:
    """Find progress that was set aside and was trained with exactly the present values."""
    for stale in reversed(stale_folders(progress)):
        recorded = read_recorded(stale, until)
        if recorded and not conditions.changes(recorded[1], present):
            return stale
    return None


def is_accepted(progress: Path, present: Mapping[str, Any]) -> bool:
    """Return whether a user accepted that a folder's checkpoints resume with just these values."""
    return _read(progress / ACCEPTED) == present or os.environ.get(ENVIRONMENT) == digest(present)


def read_accepted(progress: Path) -> dict[str, Any] | None:
    """Read the accepted values, if any."""
    return _read(progress / ACCEPTED)


def read_asked(stale: Path) -> dict[str, Any] | None:
    """Read the values that replaced those of set-aside progress, if recorded."""
    return _read(stale / SET_ASIDE)


def write_accepted(progress: Path, present: Mapping[str, Any]) -> None:
    """Record that the checkpoints of a folder may resume with these values.

    Raises:
        DiskError: it cannot be written.
    """
    _write(progress / ACCEPTED, present)


TEXT = 12


def _complete_aside(progress: Path, moving: Path) -> Path:
    for item in _items(progress):
        item.rename(moving / item.name)
    stale = _unused_name(progress, STALE, moving.name.partition("-")[2].partition("-")[0])
    moving.rename(stale)
    return stale


def _complete_restoring(progress: Path, restoring: Path) -> None:
    for item in list(restoring.iterdir()):
        if item.name == SET_ASIDE:
            item.unlink()
        else:
            item.rename(progress / item.name)
    restoring.rmdir()


def _items(progress: Path) -> Iterator[Path]:
    """Return what belongs to the progress rather than to the process that trains there."""
    return (item for item in list(progress.iterdir()) if not item.name.startswith("lock"))


def _unused_name(progress: Path, kind: str, of: str) -> Path:
    base = progress.with_name(f"{progress.name}.{kind}-{of}")
    name, count = base, 1
    while name.exists():
        count += 1
        name = base.with_name(f"{base.name}-{count}")
    return name


def _write(path: Path, trains: Mapping[str, Any]) -> None:
    with replacing(path) as new:
        write_json(new, {conditions.TRAINS: dict(trains)})


def _read(path: Path) -> dict[str, Any] | None:
    """Read the values in a file; return None, which accepts nothing, if missing or damaged."""
    trains = (conditions.read_if_whole(path) or {}).get(conditions.TRAINS)
    return trains if isinstance(trains, dict) else None
