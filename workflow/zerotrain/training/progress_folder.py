"""The folder of a phase's progress: rolling checkpoints that no rule declares.

step-00000300/     a rolling checkpoint, complete once it is there (zerotrain.checkpoint)
fingerprint.json   what its numbers depend on; on a difference the folder is set aside
damaged-step-*/    one that was found damaged, when an older one was whole
stop               touch it, and training writes a checkpoint and stops
best.json          the best validated step that is saved, which is never removed
finished.json      the step at which the phase has ended before its `until`, and why
exit.json          how the last process ended: {"code": 85, "reason": "..."}
ended-<machine>.json   exit codes of its processes that did not end with 0, by rank; -9: signal 9
ranks/             what each process is doing (zerotrain.training.pulse)
lock, lock.*       who writes (zerotrain.training.lock)
metrics.jsonl      the log of the run so far (zerotrain.training.log)
tensorboard/       and tracker-<name>.json, which run of another tracker this phase is
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerotrain import artifact
from zerotrain.artifact import digest, replacing, write_json
from zerotrain.artifact.in_use import remove
from zerotrain.errors import PipelineError
from zerotrain.training.validation_history import best_step, finished_step

FINGERPRINT = "fingerprint.json"
STOP = "stop"
EXIT = "exit.json"
ENDED = "ended-*.json"
LOG = "metrics.jsonl"
RESOURCES = "resources.json"
PENDING = "pending.json"


def ended_file(progress: Path, machine: int) -> Path:
    """How the processes of a machine have ended; machines are numbered from 0."""
    return progress / ENDED.replace("*", str(machine))


def step_folder(progress: Path, step: int) -> Path:
    """The rolling checkpoint of a step."""
    return progress / f"step-{step:08d}"


def saved_steps(progress: Path) -> list[int]:
    """Steps that have a complete rolling checkpoint, ascending."""
    return sorted(
        int(folder.name.removeprefix("step-"))
        for folder in progress.glob("step-*")
        if artifact.is_published(folder)
    )


def newest_step(progress: Path, until: int) -> int | None:
    """The newest step with a complete checkpoint that is not beyond `until`."""
    return max((step for step in saved_steps(progress) if step <= until), default=None)


def end_step(progress: Path, until: int, validation: Mapping[str, Any] | None = None) -> int | None:
    """The saved step at which a phase has ended: `until`, or where a validation ended it.

    Args:
        progress: Folder of the phase's progress.
        until: Where the phase is to end.
        validation: ResolvedPhase.validation: the rule that an early end must have come from.

    Returns:
        None where the phase is unfinished.
    """
    saved = saved_steps(progress)
    ends = (finished_step(progress, validation, until), until)
    return next((step for step in ends if step in saved), None)


def newest_whole(progress: Path, until: int) -> Path | None:
    """The newest checkpoint that is not beyond `until` and whole to the last byte.

    A damaged one is passed over and set aside, and this is said.

    Raises:
        PipelineError: there are some, and none is whole; they stay as they are.
    """
    damaged: dict[Path, str] = {}
    for step in reversed([step for step in saved_steps(progress) if step <= until]):
        folder = step_folder(progress, step)
        try:
            artifact.read(folder, "checkpoint")
        except PipelineError as error:
            damaged[folder] = error.what
        except OSError as error:
            damaged[folder] = f"{folder}: cannot be read: {error.strerror or error}"
        else:
            for other, what in damaged.items():
                aside = _set_aside(other)
                print(f"{what}; the checkpoint before it is taken{aside}", file=sys.stderr)
            return folder
    if damaged:
        raise PipelineError(
            f"{progress}: no checkpoint is whole: {'; '.join(damaged.values())}",
            hint="restore one of them from a copy, or check the disk; to train the phase from its "
            f"start instead, move {progress} away",
        )
    return None


def _set_aside(folder: Path) -> str:
    """Take a damaged checkpoint out of the row, so that it counts among none that are kept."""
    aside = folder.with_name(f"damaged-{folder.name}")
    try:
        if aside.exists():
            shutil.rmtree(aside)
        folder.rename(aside)
    except OSError:
        return ""
    return f" and this one set aside as {aside.name}"


def prune(progress: Path, keep: int, upto: int, keep_every: int | None = None) -> None:
    """Remove rolling checkpoints of the steps up to `upto`, but for these:

    the newest `keep`, every step that `keep_every` divides, the best, and those that somebody
    reads. Where the newest does not look whole, none is removed.

    Later ones, left from a time when `until` was higher, stay: they are whole and will serve again.
    """
    steps = [step for step in saved_steps(progress) if step <= upto]
    if not steps or not _looks_whole(step_folder(progress, steps[-1])):
        return
    stay = {*steps[-keep:], best_step(progress)}
    for step in steps:
        if step not in stay and not (keep_every and step % keep_every == 0):
            remove(step_folder(progress, step))


def removable(progress: Path, before: int, keep_every: int | None = None) -> list[int]:
    """Steps before `before` whose checkpoints may go where room is needed, the oldest first:

    all but the newest, the best, and every step that `keep_every` divides. Where the newest does
    not look whole, none may.
    """
    steps = [step for step in saved_steps(progress) if step < before]
    if not steps or not _looks_whole(step_folder(progress, steps[-1])):
        return []
    best = best_step(progress)
    return [s for s in steps[:-1] if s != best and not (keep_every and s % keep_every == 0)]


def freed_bytes(folder: Path) -> int:
    """What removing a checkpoint gives back: a file that a published one shares gives nothing."""
    found = (path.stat() for path in folder.rglob("*") if path.is_file())
    return sum(one.st_size for one in found if one.st_nlink == 1)


def _looks_whole(folder: Path) -> bool:
    """Whether each file is there in its size; reading them all would take as long as writing."""
    try:
        artifact.read(folder, "checkpoint", verify=False)
        return True
    except (OSError, PipelineError):
        return False


def settle(progress: Path, fingerprint: Mapping[str, Any]) -> str | None:
    """Make `progress` a folder whose checkpoints go with the fingerprint.

    What does not go with it is moved to progress.stale-<digest>, never removed.

    Returns:
        A sentence for the user where a folder was set aside, else None.
    """
    progress.mkdir(parents=True, exist_ok=True)
    _clear_leftovers(progress)
    path = progress / FINGERPRINT
    found = json.loads(path.read_text()) if path.is_file() else None
    if found is not None and found.get("accepted"):
        found = dict(fingerprint)
    said = None
    if saved_steps(progress) and found != fingerprint:
        differing = sorted(
            key
            for key in {*fingerprint, *(found or {})}
            if (found or {}).get(key, ...) != fingerprint.get(key, ...)
        )
        stale = _stale_name(progress, found or {})
        stale.mkdir()
        for item in list(progress.iterdir()):
            if not item.name.startswith("lock"):
                item.rename(stale / item.name)
        said = (
            f"progress of other making was set aside as {stale} (differs in: "
            f"{', '.join(differing)}); training starts afresh. "
            f"`zerotrain progress accept {progress.parent}` takes it back"
        )
    write_fingerprint(progress, fingerprint)
    return said


def write_fingerprint(progress: Path, fingerprint: Mapping[str, Any]) -> None:
    """Write what the checkpoints in a folder go with, whole or not at all.

    Raises:
        DiskError: the disk is full, read-only, or fails; the former fingerprint stays.
    """
    with replacing(progress / FINGERPRINT) as new:
        write_json(new, dict(fingerprint))


def accept(phase: Path) -> str:
    """Take the newest progress that was set aside back as if its fingerprint were the present one.

    Args:
        phase: Folder of the phase, results/<run>/<phase>.

    Returns:
        A sentence that says what was done.

    Raises:
        PipelineError: nothing was set aside, or a training is running.
    """
    from zerotrain.training.lock import take

    found = [folder for folder in phase.glob("progress.stale-*") if saved_steps(folder)]
    stale = sorted(found, key=lambda folder: folder.stat().st_mtime)
    if not stale:
        raise PipelineError(
            f"{phase}: no progress was set aside (no folder progress.stale-*)",
            hint="name the folder of a phase, results/RUN/PHASE",
        )
    progress = phase / "progress"
    lock = take(progress)
    try:
        write_fingerprint(stale[-1], {"accepted": True})  # first: it is what a full disk refuses
        if saved_steps(progress):
            aside = _stale_name(progress, json.loads((progress / FINGERPRINT).read_text()))
            aside.mkdir()
        else:
            aside = None
        for item in list(progress.iterdir()):
            if item.name.startswith("lock"):
                continue
            if aside:
                item.rename(aside / item.name)
            elif item.is_dir():
                shutil.rmtree(item)
            else:
                item.unlink()
        for item in list(stale[-1].iterdir()):
            item.rename(progress / item.name)
        stale[-1].rmdir()
    finally:
        lock.release()
    step = saved_steps(progress)[-1]
    kept = f"; what was there is kept as {aside}" if aside else ""
    return f"{progress}: taken back from {stale[-1].name}, goes on from step {step}{kept}"


def _clear_leftovers(progress: Path) -> None:
    """Clear what a process that was killed while it wrote or removed a checkpoint left behind."""
    for draft in progress.glob(".step-*"):
        artifact.mend(progress / draft.name[1:].rpartition(".")[0], alone=True)
    for folder in progress.glob("step-*"):
        if not artifact.is_published(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _stale_name(progress: Path, fingerprint: Mapping[str, Any]) -> Path:
    base = progress.with_name(f"{progress.name}.stale-{digest(dict(fingerprint))[:12]}")
    name, count = base, 1
    while name.exists():
        count += 1
        name = base.with_name(f"{base.name}-{count}")
    return name
