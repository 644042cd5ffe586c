"""Before a phase's first process is started: its inputs are whole and its progress goes with them.

The stage does this for the processes it launches; under torchrun or srun the first process does.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerotrain import artifact
from zerotrain.artifact import Artifact
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.launch.run_yaml import read_run_yaml
from zerotrain.model_sizes import read_sizes
from zerotrain.sources import source_digest
from zerotrain.training import checkpoint_room, ending, preflight, progress_folder

RANK = "zerotrain.training.rank"


@dataclass(frozen=True)
class Inputs:
    """What a phase is trained from, checked to the last byte."""

    phase: ResolvedPhase
    parents: dict[str, Artifact]


def read_inputs(launch: Path, base: Path, cache: Path, start: Path | None) -> Inputs:
    """Read and verify the folders.

    Raises:
        PipelineError: one is not whole.
    """
    parents = {
        "launch": artifact.read(launch, "launch"),
        "base": artifact.read(base, "base"),
        "cache": artifact.read(cache, "cache"),
    }
    if start is not None:
        parents["start"] = artifact.read(start, "state")
    return Inputs(read_run_yaml(parents["launch"].path("run.yaml")), parents)


def prepare(inputs: Inputs, progress: Path) -> None:
    """Make the progress folder, whose lock is held, one that training may go on in.

    Raises:
        PipelineError: the switch that the phase means would lose what it does not allow.
    """
    phase, parents = inputs.phase, inputs.parents
    own = fingerprint(phase, parents)
    preflight.check_progress(progress, own, phase)
    said = preflight.check_start(parents["start"], phase) if "start" in parents else []
    if aside := progress_folder.settle(progress, own):
        said.append(aside)
    for line in said:
        print(line, file=sys.stderr, flush=True)
    (progress / progress_folder.STOP).unlink(missing_ok=True)
    ending.clear(progress)


def check_room(phase: ResolvedPhase, base: Artifact, progress: Path) -> None:
    """Checkpoints that the disk cannot hold are refused before an hour is spent on them.

    Raises:
        PipelineError: there is too little room for them.
    """
    checkpoint_room.check_low(progress, phase)
    if phase.peft is not None:
        return  # counting what peft adds takes torch and seconds, and such adapters are small
    sizes = read_sizes(
        base, phase.family, phase.lora, phase.frozen_parameters, phase.trainable_parameters
    )
    for line in checkpoint_room.check_room(progress, phase, sizes):
        print(line, file=sys.stderr, flush=True)


def fingerprint(phase: ResolvedPhase, parents: dict[str, Artifact]) -> dict[str, Any]:
    """What the numbers of a phase depend on, whatever it is called and wherever it ends."""
    return {
        **phase.numbers(),
        "base": artifact.digest(parents["base"].content["parts"]),
        "cache": parents["cache"].identity,
        "start": parents["start"].identity if "start" in parents else None,
        "code": source_digest(RANK, f"zerotrain.families.{phase.family}"),
    }
