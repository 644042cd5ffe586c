"""`zerotrain progress`: remove the lock of an owner that is gone, resume what was set aside."""

from __future__ import annotations

from pathlib import Path

from zerotrain.errors import PipelineError
from zerotrain.machine.output import confirm
from zerotrain.machine.processes import ProcessRecord
from zerotrain.training.checkpointing.progress_folder import saved_steps
from zerotrain.training.checkpointing.set_aside import (
    complete_moves,
    is_moving,
    read_asked,
    set_aside,
    stale_folders,
    take_back,
    write_accepted,
)
from zerotrain.training.process import lock, lock_file

RECENT_SIGNS = 3
"""Missed signs after which the owner is no longer waited for."""


def unlock(folder: Path, *, yes: bool) -> str:
    """Remove a lock, unless its owner is visibly alive.

    Args:
        folder: A phase's progress folder.
        yes: Whether to remove it without asking.

    Returns:
        A message about what was done.

    Raises:
        PipelineError: the owner is alive, there is no terminal to ask, the answer was no, or
            another process has taken the lock since.
    """
    owner = lock.read_owner(folder)
    if owner is None:
        return f"{folder}: no lock to remove"
    who = lock.describe(folder, owner)
    if owner.is_running() is False:
        return f"{folder}: nothing to do, the next start takes the lock over: {who}, has ended"
    _check_not_alive(folder, owner)
    who = lock.describe(folder, owner)
    if not yes:
        _ask(folder, who)
    lock.remove(folder, owner)
    if later := lock.read_owner(folder):
        raise PipelineError(
            f"{folder}: another process has taken the lock since: {lock.describe(folder, later)}",
            hint="wait for it; it continues from the newest checkpoint",
        )
    return f"{folder}: unlocked; it was held by {who}"


def _check_not_alive(folder: Path, owner: ProcessRecord) -> None:
    every = lock_file.sign_seconds(owner.lease)
    recent = owner.lease and lock_file.silent_seconds(folder / lock.LOCK) < RECENT_SIGNS * every
    gave = recent and lock.wait_for_sign(folder, RECENT_SIGNS * every)
    if owner.is_running_here() or gave:
        raise PipelineError(
            f"{folder}: its holder lives: {lock.describe(folder, owner)}",
            hint=f"stop it with `touch {folder}/stop`, or end that process",
        )


def _ask(folder: Path, who: str) -> None:
    context = (
        f"{folder}: held by {who}.\n"
        "If it still trains, two trainings would write here until one of them notices."
    )
    unanswered = PipelineError(
        f"{folder}: held by {who}; it is not removed without confirmation, and no one can answer",
        hint="look whether that process runs; if it does not, call this again with --yes",
    )
    if not confirm(context, "Remove its lock?", unanswered):
        raise PipelineError(f"{folder}: the lock was left", hint="answer y to remove it")


def accept(phase: Path) -> str:
    """Restore the progress that was set aside last, to resume with the values that displaced it.

    Args:
        phase: Folder of the phase, results/<run>/<phase>.

    Returns:
        A sentence about what was done.

    Raises:
        PipelineError: nothing was set aside, or a training is running.
    """
    progress = phase / "progress"
    if not stale_folders(progress) and not is_moving(progress):
        raise PipelineError(
            f"{phase}: no progress was set aside (no folder progress.stale-*)",
            hint="name the folder of a phase, results/RUN/PHASE",
        )
    held = lock.take(progress)
    try:
        complete_moves(progress)
        if not (found_stale := stale_folders(progress)):
            return f"{progress}: taken back, resumes from step {saved_steps(progress)[-1]}"
        stale = found_stale[-1]
        present = read_asked(stale)
        if present is None:
            raise PipelineError(
                f"{stale}: nothing says for which values it was set aside",
                hint="set train.on_change: continue, move what it holds into "
                f"{progress} and start again",
            )
        write_accepted(stale, present)  # first: this write is what fails on a full disk
        kept = ""
        if saved_steps(progress):
            kept = f"; what was there is kept as {set_aside(progress, present)}"
        take_back(progress, stale)
    finally:
        held.release()
    step = saved_steps(progress)[-1]
    return f"{progress}: taken back from {stale.name}, resumes from step {step}{kept}"
