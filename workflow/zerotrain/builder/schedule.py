"""The learning rate over the steps of a run, as points of a curve."""

from __future__ import annotations

from dataclasses import dataclass

from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.launch.schedules import learning_rate

POINTS = 160
WIDTH, HEIGHT = 600, 140


@dataclass(frozen=True)
class Curve:
    """A curve in a box of WIDTH x HEIGHT.

    Attributes:
        points: Its points, as SVG has them.
        peak: The largest rate.
        first: The rate of the first step.
        last: The rate of the last step.
        steps: The last step.
        begin: Where the phase begins, as a share of the width.
        end: Where the phase ends, as a share of the width.
    """

    points: str
    peak: float
    first: float
    last: float
    steps: int
    begin: float
    end: float


def draw(phase: ResolvedPhase) -> Curve:
    """Return the curve from the first step to the schedule's horizon, or the end if it is later."""
    horizon = phase.derived.lr_scheduler_steps
    steps = max(horizon, phase.derived.until_step)
    at = sorted({round(n * (steps - 1) / (POINTS - 1)) for n in range(POINTS)})
    rates = [learning_rate(phase.train, step, horizon) for step in at]
    peak = max(rates) or 1.0
    width = max(steps - 1, 1)
    points = " ".join(
        f"{step / width * WIDTH:.1f},{HEIGHT - rate / peak * HEIGHT:.1f}"
        for step, rate in zip(at, rates, strict=True)
    )
    begin, end = phase.derived.start_step / steps, phase.derived.until_step / steps
    return Curve(points, max(rates), rates[0], rates[-1], steps, begin, end)
