"""The learning rate as a function of the global step: the same curve under every engine."""

from __future__ import annotations

import math
from typing import Protocol


class Schedule(Protocol):
    """What of a resolved phase the schedule depends on."""

    @property
    def learning_rate(self) -> float: ...
    @property
    def lr_scheduler(self) -> str: ...
    def warmup_steps(self, horizon: int) -> int: ...


def learning_rate(phase: Schedule, step: int, horizon: int) -> float:
    """Learning rate of the step that follows `step` finished ones.

    Linear warm-up from learning_rate / warm-up, then constant, or linear or cosine down to 0 at
    `horizon`; 0 beyond it.
    """
    warmup = phase.warmup_steps(horizon)
    if step < warmup:
        return phase.learning_rate * (step + 1) / warmup
    if phase.lr_scheduler == "constant":
        return phase.learning_rate
    done = min(1.0, (step - warmup) / max(1, horizon - warmup))
    share = 1 - done if phase.lr_scheduler == "linear" else (1 + math.cos(math.pi * done)) / 2
    return phase.learning_rate * share
