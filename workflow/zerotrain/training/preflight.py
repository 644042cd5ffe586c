"""What differs, and what a switch would lose: said before a process is started for it.

An engine would answer with an empty AssertionError, or not at all. Nothing here needs torch.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from zerotrain.artifact import Artifact
from zerotrain.errors import PipelineError
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.optimizers import continues
from zerotrain.optimizers import slots as slots_of
from zerotrain.position import EMA, MASTER, TrainingPosition, read_position
from zerotrain.training.progress_folder import FINGERPRINT, end_step, newest_step

LAUNCH_KEYS = {
    "engine": "engine",
    "zero_stage": "ZeRO stage",
    "offload_optimizer": "optimizer offload",
    "offload_param": "parameter offload",
    "num_processes": "processes",
    "mixed_precision": "precision",
    "optimizer": "optimizer",
    "global_batch_size": "global batch",
    "gradient_accumulation_steps": "gradient accumulation",
}
"""What only a switch may change, with our words for it."""


def check_progress(progress: Path, fingerprint: Mapping[str, Any], phase: ResolvedPhase) -> None:
    """Refuse to go on with, or set aside, checkpoints that another launch made.

    Raises:
        PipelineError: naming what differs, and the command that exports and goes on.
    """
    step = newest_step(progress, phase.until_step)
    path = progress / FINGERPRINT
    found = json.loads(path.read_text()) if path.is_file() else {}
    differing = [
        f"{word} {found[key]}, now {fingerprint[key]}"
        for key, word in LAUNCH_KEYS.items()
        if key in found and found[key] != fingerprint[key]
    ]
    if step is None or not differing:
        return
    goes_on = (
        f"`zerotrain switch {phase.run} --to {phase.preset}` ends the phase at step {step}, "
        "exports it and goes on from there in a new phase, with nothing lost"
    )
    if end_step(progress, phase.until_step, phase.validation) is not None:
        goes_on = (
            "the phase is trained to its end: write its former launch back, and append a phase "
            "with a later end under the new one"
        )
    raise PipelineError(
        f"{progress}: its {step} steps were trained under another launch than phase {phase.phase} "
        f"has now: {'; '.join(differing)}",
        hint=f"{goes_on}; to train this phase afresh instead, move {progress} away",
    )


def check_start(state: Artifact, phase: ResolvedPhase) -> list[str]:
    """Say what the phase cannot take over from the state that it starts from.

    Returns:
        A sentence for each loss that the phase's `allow` names.

    Raises:
        PipelineError: a loss that it does not name.
    """
    slots = list(json.loads(state.path("state.json").read_text())["slots"])
    losses = lost(read_position(state, "state.json"), slots, phase)
    refused = {name: text for name, text in losses.items() if name not in phase.allow}
    if refused:
        raise PipelineError(
            f"phase {phase.phase}: {'; '.join(refused.values())} (state {state.folder})",
            hint=f"to go on without, write `allow: [{', '.join(losses)}]` into the phase "
            f"{phase.phase}; to keep it, change the phase so that it fits the state",
        )
    return [f"phase {phase.phase}: {text}; allowed" for text in losses.values()]


def lost(
    position: TrainingPosition, slots: Collection[str], phase: ResolvedPhase
) -> dict[str, str]:
    """What a phase cannot take over, by the name that `allow` has for it."""
    losses: dict[str, str] = {}
    if lacks_moments(position, slots, phase):
        own, found = _own_slots(phase), sorted(set(slots) - {MASTER, EMA})
        losses["moments"] = (
            f"{phase.optimizer} continues {' and '.join(own) or 'nothing'}, but the state of "
            f"{position.optimizer or 'an unknown optimizer'} has "
            f"{' and '.join(found) or 'weights alone'}: the optimizer would begin anew"
        )
    if position.loss_scale is not None and phase.mixed_precision != "fp16":
        losses["loss_scale"] = (
            f"the state's fp16 loss scale {position.loss_scale['scale']:g} is of no use to "
            f"precision {phase.mixed_precision}: going back to fp16 would search it anew"
        )
    if EMA in slots and not phase.use_ema:
        losses["ema"] = "the state has averaged weights (ema), which this phase does not carry on"
    return losses


def lacks_moments(position: TrainingPosition, slots: Collection[str], phase: ResolvedPhase) -> bool:
    """Whether the phase's optimizer has to begin anew, and something is lost by it.

    Each optimizer goes on from its own slots, Adam and AdamW from each other's. One that keeps none
    loses nothing with a state that has none, nor does one that had made no update.
    """
    found = set(slots) - {MASTER, EMA}
    if continues(position.optimizer, phase.optimizer):
        return bool(position.optimizer_step) and found != set(_own_slots(phase))
    return bool(found or _own_slots(phase))


def _own_slots(phase: ResolvedPhase) -> list[str]:
    return slots_of(phase.optimizer, phase.optimizer_args)
