"""`zerotrain progress accept`: progress that was set aside resumes with the current values."""

from __future__ import annotations

from pathlib import Path

from zerotrain.errors import PipelineError
from zerotrain.training.checkpointing.progress_folder import saved_steps
from zerotrain.training.checkpointing.set_aside import (
    complete_moves,
    is_moving,
    read_asked,
    read_recorded,
    set_aside,
    stale_folders,
    take_back,
    write_accepted,
)
from zerotrain.training.process.lock import take


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
    lock = take(progress)
    try:
        complete_moves(progress)
        if not (found_stale := stale_folders(progress)):
            return f"{progress}: taken back, resumes from step {saved_steps(progress)[-1]}"
        stale = found_stale[-1]
        present = read_asked(stale)
        if present is None:  # an earlier version set it aside
            recorded = read_recorded(progress, 0)
            present = recorded[1].trains if recorded and recorded[1] else None
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
        lock.release()
    step = saved_steps(progress)[-1]
    return f"{progress}: taken back from {stale.name}, resumes from step {step}{kept}"
