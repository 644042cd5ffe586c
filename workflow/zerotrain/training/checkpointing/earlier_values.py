"""What a published checkpoint of an earlier version says of the values it was trained with.

Its manifest has no `trains`, and fingerprint.json is in the progress folder, which may be gone. Its
parents and its position still record some values; the others are unknown and count as equal.
"""

from __future__ import annotations

import math
from typing import Any

from zerotrain.artifact import Artifact
from zerotrain.launch.schedules import learning_rate
from zerotrain.state.position import TrainerState
from zerotrain.training.checkpointing.inputs import Inputs
from zerotrain.training.checkpointing.preflight import LAUNCH_KEYS


def read_earlier(checkpoint: Artifact, position: TrainerState, inputs: Inputs) -> dict[str, Any]:
    """Describe what a published checkpoint was trained with, as far as it says so.

    Args:
        checkpoint: The published checkpoint.
        position: Its position.
        inputs: What the phase is trained from now.

    Returns:
        The present values, except for those that differ in the checkpoint: there a base or a
        dataset is its identity, and a learning rate that of its step.
    """
    phase, trains = inputs.phase, dict(inputs.trains)
    for name, key in {"base": "base", "cache": "data", "start": "start"}.items():
        old = checkpoint.parents[name]["identity"] if name in checkpoint.parents else None
        present = inputs.parents[name].identity if name in inputs.parents else None
        if old != present:
            trains[key] = old
    engine = {**position.engine, "num_processes": position.engine.get("world_size")}
    known = {key: engine[key] for key in LAUNCH_KEYS if engine.get(key) is not None}
    known |= {"optimizer": position.optimizer, "lr_scheduler": position.lr_scheduler}
    known |= {"seed": position.rng.get("seed", phase.seed)}
    trains |= {key: value for key, value in known.items() if trains.get(key) != value}
    if (rate := _other_rate(position, inputs)) is not None:
        trains["learning_rate"] = f"{rate:g} at step {position.step}"
    return trains


def _other_rate(position: TrainerState, inputs: Inputs) -> float | None:
    """Return a group's learning rate, if none of the phase's groups has it at this step."""
    phase = inputs.phase
    rate = learning_rate(phase.train, position.step, position.lr_scheduler_steps)
    peak = phase.train.learning_rate
    own = [one.learning_rate for one in phase.train.param_groups]
    rates = [rate, *(rate * one / peak for one in own if one is not None and peak)]
    for group in position.param_groups:
        own_rate = group.get("lr")
        if isinstance(own_rate, int | float) and not any(
            math.isclose(own_rate, one, rel_tol=1e-9, abs_tol=1e-18) for one in rates
        ):
            return float(own_rate)
    return None
