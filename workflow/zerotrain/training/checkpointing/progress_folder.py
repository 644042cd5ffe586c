"""The folder of a phase's progress: rolling checkpoints that no rule declares.

step-00000300/     a rolling checkpoint, complete once it is there (zerotrain.state.checkpoint); its
                   manifest says what it trains: if that differs, the folder is set aside
accepted.json      other values that it may resume with (zerotrain.training.checkpointing.set_aside)
damaged-step-*/    a checkpoint that was found damaged while another one was whole
stop               touch it, and training writes a checkpoint and stops
best.json          the best validated step so far, which is never removed
finished.json      the step at which the phase ended before its `until`, and why
exit.json          how the last process ended: {"code": 85, "reason": "..."}
ended-<machine>.json   exit codes of its processes that did not end with 0, by rank; -9: signal 9
ranks/             what each process is doing (zerotrain.training.reporting.heartbeat)
lock, lock.*       the process that writes (zerotrain.training.process.lock)
metrics.jsonl      the log of the run so far (zerotrain.training.reporting.log)
tensorboard/       and tracker-<name>.json: this phase's run in another tracker

Damaged records of a checkpoint (the log, the resources used) are no reason to train the same steps
again: they are restored if the progress folder has them, else removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerotrain import artifact
from zerotrain.artifact import MANIFEST, RECORDS, Artifact, replacing, write_json
from zerotrain.artifact.damage import find_damage
from zerotrain.artifact.documents import read_object
from zerotrain.artifact.layout import LOG as LOG
from zerotrain.artifact.leftovers import REMOVED, remove
from zerotrain.errors import PipelineError
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.machine.regular_file import make_folder, open_to_read, write_bytes
from zerotrain.state.position import read_position
from zerotrain.training.checkpointing.conditions import check_content
from zerotrain.training.reporting.validation_history import HISTORY, best_step, finished_step

STOP = "stop"
EXIT = "exit.json"
ENDED = "ended-*.json"
KIND = "checkpoint"
POSITION = "checkpoint.json"
NEEDED_RECORDS = frozenset((RECORDS + HISTORY,))
"""Records that training depends on: they decide when it ends, and which step is its best."""
FILES = re.compile(r"(stop|lock.*|.*\.jsonl?)$")
FOLDERS = re.compile(r"(\.?step-|damaged-step-|(ranks|tensorboard|samples)$)")
"""Names in a progress folder; other programs, such as trackers, have folders of their own there."""
LOSSES = {
    "metrics.jsonl": "the log of the run begins again at this step",
    "resources.json": "time and memory used before this step are not counted",
    "pending.json": "the next line of the log averages the steps after this one",
}
"""The consequence of losing each record."""


def check_entries(progress: Path) -> None:
    """Check that files and folders of a progress folder are no links, pipes or devices.

    A start removes, replaces and fills them.

    Raises:
        FileError: one is; or a folder has the name of a file, or a file that of a folder.
    """
    for entry in os.scandir(progress):
        with contextlib.suppress(FileNotFoundError):  # a draft of another start, removed since
            mode = entry.stat(follow_symlinks=False).st_mode
            if FOLDERS.match(entry.name):
                if not stat.S_ISDIR(mode):
                    make_folder(Path(entry.path))
            elif not stat.S_ISREG(mode) and (FILES.match(entry.name) or not stat.S_ISDIR(mode)):
                open_to_read(Path(entry.path)).close()


def exit_codes_file(progress: Path, machine: int) -> Path:
    """Return the file of a machine's exit codes; machines are numbered from 0."""
    return progress / ENDED.replace("*", str(machine))


def step_folder(progress: Path, step: int) -> Path:
    """Return the folder of a step's rolling checkpoint."""
    return progress / f"step-{step:08d}"


def saved_steps(progress: Path) -> list[int]:
    """Return the steps that have a complete rolling checkpoint, ascending."""
    return sorted(
        int(folder.name.removeprefix("step-"))
        for folder in progress.glob("step-*")
        if folder.name.removeprefix("step-").isdecimal() and artifact.is_published(folder)
    )


def newest_step(progress: Path, until: int) -> int | None:
    """Return the newest step with a complete checkpoint that is not beyond `until`, if any."""
    return max((step for step in saved_steps(progress) if step <= until), default=None)


def end_step(progress: Path, phase: ResolvedPhase) -> int | None:
    """Return the saved step at which a phase ended: `until`, or where its validation ended it.

    Returns:
        None if the phase is unfinished.
    """
    saved, until = saved_steps(progress), phase.derived.until_step
    ends = (finished_step(progress, phase.derived.validation, until), until)
    return next((step for step in ends if step in saved), None)


def newest_intact(progress: Path, until: int) -> Path | None:
    """Return the newest checkpoint that is not beyond `until` and whole to the last byte.

    Damaged ones are skipped and set aside; damaged records are repaired. Both are printed.

    Raises:
        PipelineError: there are checkpoints, but none is whole; they stay as they are.
    """
    damaged: dict[Path, str] = {}
    for step in reversed([step for step in saved_steps(progress) if step <= until]):
        folder = step_folder(progress, step)
        try:
            lines = repair_records(read_intact(folder), progress / LOG)
        except PipelineError as error:
            damaged[folder] = error.what
        except OSError as error:
            damaged[folder] = f"{folder}: cannot be read: {error.strerror or error}"
        else:
            for other, what in damaged.items():
                lines.append(f"{what}; the checkpoint before it is taken{_set_aside(other)}")
            for line in lines:
                print(line, file=sys.stderr)
            return folder
    if damaged:
        raise PipelineError(
            f"{progress}: no checkpoint is whole: {'; '.join(damaged.values())}",
            hint="restore one of them from a copy, or check the disk; to train the phase from its "
            f"start instead, move {progress} away",
        )
    return None


def _set_aside(folder: Path) -> str:
    """Rename a damaged checkpoint, so that it does not count; return a clause for the message."""
    aside = folder.with_name(f"damaged-{folder.name}")
    try:
        if aside.exists():
            shutil.rmtree(aside)
        folder.rename(aside)
    except OSError:
        return ""
    return f" and this one set aside as {aside.name}"


def prune(progress: Path, keep: int, upto: int, keep_every: int | None = None) -> None:
    """Remove rolling checkpoints of the steps up to `upto`, except for these:

    the newest `keep`, every step that `keep_every` divides, the best, and those that a process
    reads. If the newest does not look whole, none is removed.

    Later ones, from a time when `until` was higher, stay: they are whole and can be used again.
    """
    steps = [step for step in saved_steps(progress) if step <= upto]
    if not steps or not _looks_whole(step_folder(progress, steps[-1])):
        return
    stay = {*steps[-keep:], best_step(progress)}
    for step in steps:
        if step not in stay and not (keep_every and step % keep_every == 0):
            remove(step_folder(progress, step))


def list_removable(progress: Path, before: int, keep_every: int | None = None) -> list[int]:
    """Return the steps before `before` that may be removed to make room, the oldest first:

    all except the newest, the best, and every step that `keep_every` divides. If the newest does
    not look whole, none may be removed.
    """
    steps = [step for step in saved_steps(progress) if step < before]
    if not steps or not _looks_whole(step_folder(progress, steps[-1])):
        return []
    best = best_step(progress)
    return [s for s in steps[:-1] if s != best and not (keep_every and s % keep_every == 0)]


def freed_bytes(folder: Path) -> int:
    """Return the bytes that removing a checkpoint frees; files shared with a published one stay."""
    stats = (path.stat() for path in folder.rglob("*") if path.is_file())
    return sum(one.st_size for one in stats if one.st_nlink == 1)


def _looks_whole(folder: Path) -> bool:
    """Return whether each file has its size; reading them all would take as long as writing."""
    try:
        artifact.read(folder, "checkpoint", verify=False)
        return True
    except (OSError, PipelineError):
        return False


def clear_leftovers(progress: Path) -> list[str]:
    """Clean up after a process that was killed while it wrote or removed a checkpoint.

    Returns:
        A line for each checkpoint without a manifest, which is set aside.

    Raises:
        PipelineError: there is no other checkpoint; it stays as it is.
    """
    for draft in progress.glob(".step-*"):
        if draft.name.endswith(REMOVED):
            shutil.rmtree(draft, ignore_errors=True)
        else:
            artifact.recover_interrupted_publish(
                progress / draft.name[1:].rpartition(".")[0], alone=True
            )
    lines = []
    for folder in sorted(progress.glob("step-*")):
        if artifact.is_published(folder) or not folder.is_dir():
            continue
        if not any(folder.iterdir()):
            folder.rmdir()
            continue
        what = f"{folder}: its manifest.json is missing"
        if not saved_steps(progress):
            raise PipelineError(
                f"{what}, and there is no other checkpoint",
                hint="restore the file from a copy; to train the phase from its start instead, "
                f"move {progress} away",
            )
        lines.append(f"{what}; another checkpoint is taken{_set_aside(folder)}")
    return lines


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
        document = read_object(folder / MANIFEST) | {"files": needed | records}
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
        with open_to_read(log) as stream:
            if os.fstat(stream.fileno()).st_size < entry["bytes"]:
                return False
            data = stream.read(entry["bytes"])
    except OSError:
        return False
    if hashlib.sha256(data).hexdigest() != entry["sha256"]:
        return False
    with replacing(path) as new:
        write_bytes(new, data)
    return True
