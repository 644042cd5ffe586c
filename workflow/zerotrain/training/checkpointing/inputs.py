"""What a phase is trained from: the launch, the base, the cache and the starting state."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from zerotrain import artifact
from zerotrain.artifact import Artifact
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.launch.run_yaml import read_run_yaml
from zerotrain.training.checkpointing import conditions, input_check


@dataclass(frozen=True)
class Inputs:
    """What a phase is trained from, checked as far as training reads it."""

    phase: ResolvedPhase
    parents: dict[str, Artifact]

    @cached_property
    def trains(self) -> dict[str, Any]:
        """What the phase trains; see zerotrain.training.checkpointing.conditions."""
        return conditions.describe_training(self.phase, self.parents)


def read_inputs(launch: Path, base: Path, cache: Path, start: Path | None) -> Inputs:
    """Read and verify the folders.

    Raises:
        PipelineError: one is damaged or incomplete.
    """
    parents = {"launch": artifact.read(launch, "launch")}
    phase = read_run_yaml(parents["launch"].path("run.yaml"))
    parents["base"] = input_check.read_base(base, phase)
    parents["cache"] = input_check.read_input(cache, "cache")
    if start is not None:
        parents["start"] = input_check.read_input(start, "state")
    return Inputs(phase, parents)
