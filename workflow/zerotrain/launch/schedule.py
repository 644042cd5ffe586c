"""Learning rate as a function of the global step: the same curve under every engine.

Steps count from the start of the run, over all phases. docs/schedules.md has the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from zerotrain.config.training import TrainConfig
from zerotrain.launch import deepspeed_schedule, transformers_schedule


def learning_rate(train: TrainConfig, step: int, horizon: int) -> float:
    """Return the learning rate of the step after `step` completed ones.

    The usual schedules warm up linearly from learning_rate / warm-up, then follow their shape until
    `horizon` and keep their last value. Those of CURVES have their own warm-ups.
    """
    warmup = warmup_steps(train, horizon)
    if curve := CURVES.get(train.lr_scheduler):
        return curve(train.learning_rate, train.lr_scheduler_args, step, warmup, horizon)
    if step < warmup:
        return train.learning_rate * (step + 1) / warmup
    if train.lr_scheduler in ("constant", "constant_with_warmup"):
        return train.learning_rate
    done = min(1.0, (step - warmup) / max(1, horizon - warmup))
    if train.lr_scheduler == "polynomial":
        end, power = train.lr_scheduler_args["lr_end"], train.lr_scheduler_args["power"]
        return float((train.learning_rate - end) * (1 - done) ** power + end)
    if train.lr_scheduler == "cosine_with_restarts" and done < 1:
        done = train.lr_scheduler_args["num_cycles"] * done % 1.0
    share = 1 - done if train.lr_scheduler == "linear" else (1 + math.cos(math.pi * done)) / 2
    return train.learning_rate * share


def momentum(train: TrainConfig, step: int, horizon: int) -> float | None:
    """Return Adam's first beta after `step` completed steps; None: the phase's own."""
    if train.lr_scheduler != "OneCycle":
        return None
    return deepspeed_schedule.one_cycle_momentum(train.lr_scheduler_args, step)


def follows_horizon(train: TrainConfig) -> bool:
    """Return whether another horizon would change the learning rates."""
    if train.lr_warmup_ratio:
        return True
    if train.lr_scheduler == "warmup_stable_decay":
        return train.lr_scheduler_args["num_stable_steps"] is None
    return train.lr_scheduler not in ENDLESS


def warmup_steps(train: TrainConfig, horizon: int) -> int:
    """Return the warm-up steps under a horizon, which may differ from the launch's."""
    if train.lr_warmup_ratio is None:
        return train.lr_warmup_steps
    return warmup_share(train.lr_warmup_ratio, horizon)


def warmup_share(ratio: float, horizon: int) -> int:
    """Return a share of a schedule in whole steps, rounded up; 0.07 of 100 is 7, not 8."""
    return math.ceil(Fraction(str(ratio)) * horizon)


def sine(peak: float, args: Mapping[str, Any], step: int, steps: int, horizon: int) -> float:
    """Return SimpleTuner's sine: a wave between lr_end and the peak, which starts midway and rises.

    SimpleTuner (simpletuner/helpers/training/custom_schedule.py) rounds each rate down to a
    multiple of 1e-9; this function does not.
    """
    low: float = args["lr_end"]
    wave = math.sin(math.pi * step / args["half_period_steps"])
    return low + (peak - low) * (1 + wave) / 2


ENDLESS = (
    "constant", "constant_with_warmup", "inverse_sqrt", "sine", "WarmupLR", "OneCycle",
    "LRRangeTest",
)  # fmt: skip
"""Schedules without a horizon."""

CURVES: dict[str, Callable[[float, Mapping[str, Any], int, int, int], float]] = {
    "inverse_sqrt": transformers_schedule.inverse_sqrt,
    "cosine_with_min_lr": transformers_schedule.cosine_with_min_lr,
    "cosine_warmup_with_min_lr": transformers_schedule.cosine_warmup_with_min_lr,
    "warmup_stable_decay": transformers_schedule.warmup_stable_decay,
    "sine": sine,
    "WarmupLR": deepspeed_schedule.warmup,
    "WarmupDecayLR": deepspeed_schedule.warmup_decay,
    "WarmupCosineLR": deepspeed_schedule.warmup_cosine,
    "OneCycle": deepspeed_schedule.one_cycle,
    "LRRangeTest": deepspeed_schedule.range_test,
}
"""Schedules that compute their own warm-up."""
