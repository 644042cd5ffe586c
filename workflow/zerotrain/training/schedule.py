"""The learning rate as a function of the global step: the same curve under every engine.

Steps count from the start of the run, through all phases. docs/schedules.md has the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from zerotrain.training import deepspeed_schedule


class Schedule(Protocol):
    """What of a resolved phase the schedule depends on."""

    @property
    def learning_rate(self) -> float: ...
    @property
    def lr_scheduler(self) -> str: ...
    @property
    def lr_scheduler_args(self) -> Mapping[str, Any]: ...
    @property
    def lr_warmup_ratio(self) -> float | None: ...
    def warmup_steps(self, horizon: int) -> int: ...


def learning_rate(phase: Schedule, step: int, horizon: int) -> float:
    """Learning rate of the step that follows `step` finished ones.

    The usual schedules warm up linearly from learning_rate / warm-up, then follow their shape until
    `horizon` and stay where it ends. DeepSpeed's have their own warm-ups.
    """
    warmup = phase.warmup_steps(horizon)
    if curve := DEEPSPEED.get(phase.lr_scheduler):
        return curve(phase.learning_rate, phase.lr_scheduler_args, step, warmup, horizon)
    if step < warmup:
        return phase.learning_rate * (step + 1) / warmup
    if phase.lr_scheduler in ("constant", "constant_with_warmup"):
        return phase.learning_rate
    done = min(1.0, (step - warmup) / max(1, horizon - warmup))
    if phase.lr_scheduler == "polynomial":
        end, power = phase.lr_scheduler_args["lr_end"], phase.lr_scheduler_args["power"]
        return float((phase.learning_rate - end) * (1 - done) ** power + end)
    if phase.lr_scheduler == "cosine_with_restarts" and done < 1:
        done = phase.lr_scheduler_args["num_cycles"] * done % 1.0
    share = 1 - done if phase.lr_scheduler == "linear" else (1 + math.cos(math.pi * done)) / 2
    return phase.learning_rate * share


def momentum(phase: Schedule, step: int, horizon: int) -> float | None:
    """Adam's first beta at the step that follows `step` finished ones; None: the phase's own."""
    if phase.lr_scheduler != "OneCycle":
        return None
    return deepspeed_schedule.one_cycle_momentum(phase.lr_scheduler_args, step)


def follows_horizon(phase: Schedule) -> bool:
    """Whether another horizon would give other learning rates."""
    return phase.lr_scheduler not in ENDLESS or bool(phase.lr_warmup_ratio)


ENDLESS = ("constant", "constant_with_warmup", "WarmupLR", "OneCycle", "LRRangeTest")
"""Schedules that no horizon ends."""

DEEPSPEED: dict[str, Callable[[float, Mapping[str, Any], int, int, int], float]] = {
    "WarmupLR": deepspeed_schedule.warmup,
    "WarmupDecayLR": deepspeed_schedule.warmup_decay,
    "WarmupCosineLR": deepspeed_schedule.warmup_cosine,
    "OneCycle": deepspeed_schedule.one_cycle,
    "LRRangeTest": deepspeed_schedule.range_test,
}
