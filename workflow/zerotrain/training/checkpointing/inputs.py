"""What a phase is trained from: the launch, the base, the cache and the starting state.

They are checked before the phase's processes start, while devices wait for them: files with hashes
that this machine remembers are not read again. Weights of the base that no process opens in
training are not read at all: their sizes are compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from zerotrain import artifact
from zerotrain.artifact import Artifact, file_sha256
from zerotrain.artifact.manifest import read_manifest
from zerotrain.artifact.verdicts import remembering
from zerotrain.launch.files import read_run_yaml
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.models.sizes import TRAINED
from zerotrain.training.checkpointing import conditions

WEIGHTS = (".safetensors", ".bin")
DECODER = "vae/"
"""Folder of the decoder, which turns a validation's samples into images."""


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
    parents["base"] = read_base(base, phase)
    parents["cache"] = read_input(cache, "cache")
    if start is not None:
        parents["start"] = read_input(start, "state")
    return Inputs(phase, parents)


def read_input(folder: Path, kind: str) -> Artifact:
    """Read a folder and check all its files.

    Raises:
        PipelineError: it is missing, of another kind, or incomplete.
    """
    return artifact.read(folder, kind, sha256=remembering(file_sha256))


def read_base(folder: Path, phase: ResolvedPhase) -> Artifact:
    """Read a base and check the files that training the phase opens; of others only the sizes.

    Raises:
        PipelineError: it is missing or not a base, or one of these files is missing or differs.
    """
    base = read_manifest(folder, "base")
    base.verify(sha256=None)
    opened = [name for name in base.files if _opens(name, phase)]
    base.verify(remembering(file_sha256), opened)
    return base


def _opens(name: str, phase: ResolvedPhase) -> bool:
    if not name.endswith(WEIGHTS) or TRAINED.fullmatch(name):
        return True
    return phase.derived.validation is not None and name.startswith(DECODER)
