"""Where a training stands."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Clock:
    """Where the training stands and what its schedule is."""

    step: int
    samples: int
    horizon: int
    """lr_scheduler_steps."""
