"""Count the steps and samples of a training."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class StepCounter:
    """The training's step and sample count, and the horizon of its schedule."""

    step: int
    samples: int
    horizon: int
    """lr_scheduler_steps."""
