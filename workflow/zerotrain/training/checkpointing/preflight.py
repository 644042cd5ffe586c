"""What a phase is trained from, and differences and losses of a switch, before a process starts.

An engine would raise an empty AssertionError, or report nothing. Nothing here needs torch.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from zerotrain import artifact
from zerotrain.artifact import Artifact, file_sha256
from zerotrain.artifact.documents import read_record
from zerotrain.artifact.manifest import read_manifest
from zerotrain.artifact.recipe import Difference
from zerotrain.artifact.verdicts import remembering
from zerotrain.config.optimizers import continues
from zerotrain.config.optimizers import slots as slots_of
from zerotrain.errors import PipelineError
from zerotrain.launch.files import read_run_yaml
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.models.sizes import TRAINED
from zerotrain.state.position import EMA_SLOT, MASTER, TrainerState, read_position
from zerotrain.training.checkpointing import conditions
from zerotrain.training.checkpointing.progress_folder import end_step, newest_step

LAUNCH_KEYS = {
    "engine": "engine",
    "zero_stage": "ZeRO stage",
    "offload_optimizer": "optimizer offload",
    "offload_param": "parameter offload",
    "num_processes": "processes",
    "mixed_precision": "precision",
    "global_batch_size": "global batch",
}
"""What only a switch may change, with its name in messages."""
OF_PRESET = {"engine", "zero_stage", "offload_optimizer", "offload_param"}
"""Keys that a preset sets."""


@dataclass(frozen=True)
class _StateFile:
    """What is read here of state.json."""

    slots: dict[str, Any]


def check_progress(progress: Path, changed: list[Difference], phase: ResolvedPhase) -> None:
    """Refuse to resume, or set aside, checkpoints that another launch made.

    Args:
        progress: Folder of the phase's progress.
        changed: What differs from the values that they were trained with.
        phase: The phase.

    Raises:
        PipelineError: another launch made them; the message names the differences, and the command
            that exports and continues.
    """
    step = newest_step(progress, phase.derived.until_step)
    by_key = {one.key: one for one in changed}
    differing = [
        f"{word} {by_key[key].old}, now {by_key[key].new}"
        for key, word in LAUNCH_KEYS.items()
        if key in by_key
    ]
    if step is None or not differing:
        return
    way = (
        f"`{switch_command(phase, by_key)}` ends the phase at step {step}, "
        "exports it and continues from there in a new phase, with nothing lost"
    )
    if end_step(progress, phase) is not None:
        way = (
            "the phase is trained to its end: write its former launch back, and append a phase "
            "with a later end under the new one"
        )
    raise PipelineError(
        f"{progress}: its {step} steps were trained under another launch than phase {phase.phase} "
        f"has now: {'; '.join(differing)}",
        hint=f"{way}; to train this phase from its start instead, move {progress} away",
    )


def check_start(state: Artifact, phase: ResolvedPhase) -> list[str]:
    """Report what the phase cannot take over from the state that it starts from.

    Returns:
        A message for each loss that the phase's `allow` names.

    Raises:
        PipelineError: there is a loss that `allow` does not name.
    """
    slots = [*read_record(state.path("state.json"), _StateFile).slots]
    losses = find_losses(read_position(state, "state.json"), slots, phase)
    refused = {name: text for name, text in losses.items() if name not in phase.allow}
    if refused:
        raise PipelineError(
            f"phase {phase.phase}: {'; '.join(refused.values())} (state {state.folder})",
            hint=f"to continue without, write `allow: [{', '.join(losses)}]` into the phase "
            f"{phase.phase}; to keep it, change the phase so that it fits the state",
        )
    return [f"phase {phase.phase}: {text}; allowed" for text in losses.values()]


def find_losses(
    position: TrainerState, slots: Collection[str], phase: ResolvedPhase
) -> dict[str, str]:
    """Describe what a phase cannot take over from a state, by its name in `allow`."""
    losses: dict[str, str] = {}
    if lacks_moments(position, slots, phase):
        own, slots_there = _own_slots(phase), sorted(set(slots) - {MASTER, EMA_SLOT})
        losses["moments"] = (
            f"{phase.train.optimizer} continues {' and '.join(own) or 'nothing'}, but the state of "
            f"{position.optimizer or 'an unknown optimizer'} has "
            f"{' and '.join(slots_there) or 'weights alone'}: the optimizer state would be reset"
        )
    if position.loss_scale is not None and phase.launch.mixed_precision != "fp16":
        losses["loss_scale"] = (
            f"the state's fp16 loss scale {position.loss_scale['scale']:g} is of no use to "
            f"precision {phase.launch.mixed_precision}: a return to fp16 would search for it again"
        )
    if EMA_SLOT in slots and not phase.train.use_ema:
        losses["ema"] = "the state has averaged weights (ema), which this phase does not carry on"
    return losses


def lacks_moments(position: TrainerState, slots: Collection[str], phase: ResolvedPhase) -> bool:
    """Return whether the phase's optimizer has to start again, and something is lost by it.

    Each optimizer continues from its own slots, Adam and AdamW from each other's. Nothing is lost
    if neither optimizer has slots, or if the same one had made no update.
    """
    slots_there = set(slots) - {MASTER, EMA_SLOT}
    if continues(position.optimizer, phase.train.optimizer):
        return bool(position.optimizer_step) and slots_there != set(_own_slots(phase))
    return bool(slots_there or _own_slots(phase))


def state_slots(phase: ResolvedPhase) -> list[str]:
    """Return the slots of a phase's checkpoints, and of the state at its end."""
    return [MASTER, *_own_slots(phase), *([EMA_SLOT] if phase.train.use_ema else [])]


def _own_slots(phase: ResolvedPhase) -> list[str]:
    return slots_of(phase.train.optimizer, phase.train.optimizer_args)


def switch_command(phase: ResolvedPhase, differing: Collection[str]) -> str:
    """Return the `zerotrain switch` line that continues a phase under its current launch.

    Args:
        phase: The phase, with its current launch.
        differing: Keys whose values differ in the launch of its saved steps, such as "zero_stage".

    Returns:
        The command with an option for each key that has one; without any, with the preset.
    """
    words = ["zerotrain", "switch", phase.run]
    own = {
        "num_processes": ("--num-processes", phase.launch.num_processes),
        "mixed_precision": ("--mixed-precision", phase.launch.mixed_precision),
    }
    named = own.keys() & set(differing)
    if OF_PRESET & set(differing) or not named:
        words += ["--to", phase.launch.preset]
    for key, (flag, value) in own.items():
        if key in named:
            words += [flag, str(value)]
    return shlex.join(words)


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

    Devices wait for this: files with hashes that this machine remembers are not read again. Weights
    of the base that no process opens in training are not read at all: their sizes are compared.

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
