"""Checks before a phase's first process starts: inputs are complete and the progress fits them.

The stage runs them for the processes it launches; under torchrun or srun the first process does.
"""

from __future__ import annotations

import sys
from pathlib import Path

from zerotrain.artifact import Artifact
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.models.sizes import read_sizes
from zerotrain.training.checkpointing import (
    checkpoint_room,
    edited,
    preflight,
    progress_folder,
    set_aside,
)
from zerotrain.training.checkpointing.inputs import Inputs
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
    changes = edited.prepare_progress_folder(progress, inputs.trains, phase)
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
