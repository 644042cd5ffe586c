"""Checks before a phase's first process starts: inputs are complete and the progress fits them.

The stage runs them for the processes it launches; under torchrun or srun the first process does.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerotrain.artifact import Artifact
from zerotrain.artifact.recipe import Difference, format_differences
from zerotrain.errors import PipelineError
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.models.sizes import read_sizes
from zerotrain.training.checkpointing import (
    checkpoint_room,
    conditions,
    preflight,
    progress_folder,
    set_aside,
)
from zerotrain.training.checkpointing.preflight import Inputs
from zerotrain.training.checkpointing.progress_folder import saved_steps
from zerotrain.training.process import ending


def prepare(inputs: Inputs, progress: Path) -> None:
    """Prepare the progress folder, whose lock is held, for a start or a resume.

    Raises:
        FileError: a link, a pipe or a folder is in the place of one of its files.
        PipelineError: the switch into this phase would lose something that the phase does not allow
            to be lost, or its checkpoints were trained with other values and train.on_change is
            `stop`.
    """
    phase, parents = inputs.phase, inputs.parents
    progress.mkdir(parents=True, exist_ok=True)
    progress_folder.check_entries(progress)
    set_aside.complete_moves(progress)
    messages = progress_folder.clear_leftovers(progress)
    changes = prepare_progress_folder(progress, inputs.trains, phase)
    if "start" in parents:
        messages += preflight.check_start(parents["start"], phase)
    for line in [*messages, *changes]:
        print(line, file=sys.stderr, flush=True)
    (progress / progress_folder.STOP).unlink(missing_ok=True)
    ending.clear(progress)


def check_room(phase: ResolvedPhase, base: Artifact, progress: Path) -> None:
    """Refuse a disk that cannot hold the checkpoints, before an hour is spent on them.

    Raises:
        PipelineError: there is too little room for them.
    """
    checkpoint_room.check_low(progress, phase)
    if phase.peft is not None:
        return  # peft's parameters need torch and seconds to count, and such adapters are small
    sizes = read_sizes(
        base, phase.family, phase.lora, phase.frozen_parameters, phase.trainable_parameters
    )
    for line in checkpoint_room.check_room(progress, phase, sizes):
        print(line, file=sys.stderr, flush=True)


MOST_SHOWN = 20


def prepare_progress_folder(
    progress: Path, present: Mapping[str, Any], phase: ResolvedPhase
) -> list[str]:
    """Prepare a progress folder, whose lock is held, so that a phase may resume from it.

    What was trained with other values is set aside, kept or refused, as train.on_change says. What
    was set aside with exactly the present values is taken back.

    Args:
        progress: Folder of the phase's progress.
        present: What the phase trains now.
        phase: The resolved phase.

    Returns:
        Lines for the user.

    Raises:
        PipelineError: the edit is refused, or needs a switch.
    """
    recorded = set_aside.read_recorded(progress, phase.derived.until_step)
    if recorded is None:
        if saved_steps(progress):
            return []  # none can be read; the choice of a checkpoint reports it
        return _restore_matching(progress, present, phase)
    step, made = recorded
    changed = conditions.changes(made, present)
    accepted = set_aside.is_accepted(progress, present)
    if step > phase.derived.until_step and (
        not changed or accepted or phase.train.on_change == "continue"
    ):
        return _handle_later_checkpoints(progress, phase)
    if not changed:
        return []
    if accepted:
        return [_describe_continuation(phase, step, changed, "accepted")]
    preflight.check_progress(progress, changed, phase)
    if phase.train.on_change == "continue":
        return [_describe_continuation(phase, step, changed, "train.on_change: continue")]
    if phase.train.on_change == "stop":
        raise PipelineError(
            f"{_describe_change(progress, phase, step, changed)}; train.on_change: stop",
            hint="write the former values back; or set train.on_change: continue, which resumes "
            "with the new ones, or restart, which sets the steps aside and trains from the start",
        )
    stale = set_aside.set_aside(progress, present)
    lines = _restore_matching(progress, present, phase)
    if lines:
        return [f"{phase.phase}: steps of other values are kept as {stale}", *lines]
    return [
        f"{_describe_change(progress, phase, step, changed)}: they are set aside as {stale}, and "
        "training restarts from the start of the phase. To restore them, write the former values "
        f"back and start again. To continue from step {step} with the new values: "
        f"`zerotrain progress accept {'/'.join(progress.parent.parts[-2:])}`"
    ]


def _restore_matching(
    progress: Path, present: Mapping[str, Any], phase: ResolvedPhase
) -> list[str]:
    """Take back what was set aside with the present values."""
    stale = set_aside.find_matching(progress, phase.derived.until_step, present)
    if stale is None:
        return []
    set_aside.take_back(progress, stale)
    step = saved_steps(progress)[-1]
    return [
        f"{phase.phase}: {stale.name} was trained with the present values and is taken back, with "
        f"its {step} steps"
    ]


def _handle_later_checkpoints(progress: Path, phase: ResolvedPhase) -> list[str]:
    """Handle checkpoints that are all of steps after the phase's `until`."""
    steps = ", ".join(f"{step:,}" for step in saved_steps(progress))
    until = phase.derived.until_step
    what = f"{progress}: its checkpoints (steps {steps}) are all after `until` {until:,}"
    first = saved_steps(progress)[0]
    if phase.train.on_change != "restart":
        raise PipelineError(
            f"{what}; train.on_change: {phase.train.on_change}",
            hint=f"set the phase's `until` to {first} or later; or set train.on_change: restart, "
            "which trains from the start of the phase and keeps them",
        )
    return [
        f"{what}: training restarts from the start of the phase. They are kept; with an `until` of "
        f"{first} or later, training resumes from them"
    ]


def _describe_change(
    progress: Path, phase: ResolvedPhase, step: int, changed: list[Difference]
) -> str:
    values = format_differences(changed, MOST_SHOWN)
    return f"{progress}: its {step:,} steps were trained with other values than phase " + (
        f"{phase.phase} has now ({values})"
    )


def _describe_continuation(
    phase: ResolvedPhase, step: int, changed: list[Difference], why: str
) -> str:
    values = format_differences(changed, MOST_SHOWN)
    return f"{phase.phase}: continues from step {step} with other values ({values}): {why}"
