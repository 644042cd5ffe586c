"""The loss of a run as lines of an SVG: places in a drawing of fixed size that a page scales."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 720.0, 240.0
LEFT, RIGHT, TOP, BOTTOM = 72.0, 32.0, 24.0, 24.0
"""Margins, which hold the numbers and the names of phases."""
EDGES = (LEFT, WIDTH - RIGHT, TOP, HEIGHT - BOTTOM)
"""Left, right, top and bottom of the curves."""
MOST_POINTS = 300
"""More cannot be seen apart; the page asks for the curve every two seconds."""
TICKS = 5
SMALLEST, LARGEST = 1e-30, 1e30
"""Limits of what is drawn: ranges and values beyond them have no logarithm, or overflow."""
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Tick:
    """A number at an axis, or the name of a phase, with its place in the drawing."""

    at: float
    text: str


@dataclass(frozen=True)
class LossCurve:
    """A drawing of WIDTH x HEIGHT.

    Attributes:
        loss: Places of the training loss, as a polyline has them.
        val_loss: Places of the validation loss.
        steps: Ticks of the horizontal axis.
        losses: Ticks of the vertical axis.
        phases: Where each phase but the first begins.
        about: What the drawing shows, in words.
    """

    loss: str
    val_loss: str
    steps: list[Tick]
    losses: list[Tick]
    phases: list[Tick]
    about: str


def draw_loss(
    loss: Points, val_loss: Points, phase_starts: Sequence[tuple[int, str]]
) -> LossCurve | None:
    """Draw the losses of a run.

    Args:
        loss: Mean training loss by step.
        val_loss: Validation loss by step.
        phase_starts: The step after which each phase begins, with its name.

    Returns:
        The drawing; None if there are no two values that can be drawn.
    """
    loss, val_loss = _finite(loss), _finite(val_loss)
    both = [*loss, *val_loss]
    if len(both) < 2:
        return None
    first, last = min(step for step, _ in both), max(step for step, _ in both)
    last = max(last, first + 1)
    low, high = min(value for _, value in both), max(value for _, value in both)
    room = max((high - low) * 0.05 or abs(high) * 0.05 or 1.0, SMALLEST)
    low, high = low - room, high + room

    def x(step: float) -> float:
        return LEFT + (step - first) / (last - first) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def line(points: Points) -> str:
        return " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)

    digits = max(0, 2 - math.floor(math.log10(high - low)))
    return LossCurve(
        loss=line(thin_out(loss)),
        val_loss=line(thin_out(val_loss)),
        steps=[Tick(x(at), f"{at:,.0f}") for at in find_ticks(first, last) if at == int(at)],
        losses=[Tick(y(at), f"{at:.{digits}f}") for at in find_ticks(low, high)],
        phases=[Tick(x(step), name) for step, name in phase_starts[1:] if first <= step <= last],
        about=_describe(loss, val_loss),
    )


def thin_out(points: Points) -> list[tuple[float, float]]:
    """Return at most MOST_POINTS points, each the mean of its neighbours."""
    each = math.ceil(len(points) / MOST_POINTS) or 1
    groups = [points[start : start + each] for start in range(0, len(points), each)]
    return [
        (sum(step for step, _ in group) / len(group), sum(value for _, value in group) / len(group))
        for group in groups
    ]


def find_ticks(low: float, high: float) -> list[float]:
    """Return about TICKS round numbers of a range: multiples of 1, 2 or 5 times a power of 10."""
    rough = (high - low) / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _finite(points: Points) -> list[tuple[float, float]]:
    return [(step, value) for step, value in points if abs(value) < LARGEST]


def _describe(loss: Points, val_loss: Points) -> str:
    parts = [
        f"{name} {points[0][1]:.4g} at step {points[0][0]:,} to {points[-1][1]:.4g} at step "
        f"{points[-1][0]:,}"
        for name, points in (("training loss", loss), ("validation loss", val_loss))
        if points
    ]
    return "; ".join(parts)
