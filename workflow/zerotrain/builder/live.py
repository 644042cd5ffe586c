"""What the live page of a run shows: its state, read from files, and its pictures by number."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from zerotrain.artifact.layout import CONFIGS, RunFolder, run_of
from zerotrain.builder.writing import NAME
from zerotrain.errors import PipelineError
from zerotrain.run.plan import stamp_of
from zerotrain.run.runs import phase_folders, runs_here
from zerotrain.run.view import RunView
from zerotrain.run.watch.state import RunState, read_state

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


MOST_SHOWN = 12


@dataclass(frozen=True)
class Picture:
    """A picture of a run.

    Attributes:
        number: Its place by age, by which the page asks for it: the oldest is 0.
        phase: The phase that made it.
        title: What it shows.
        version: Changes with the file, so that no browser shows an older one.
    """

    number: int
    phase: str
    title: str
    version: int
    file: Path


class RunReaders:
    """One view of each run; each request reads only what is new since the last."""

    def __init__(self) -> None:
        self._views: dict[tuple[str, Path | None], RunView] = {}
        self._turn = threading.Lock()

    def read(self, run: str) -> RunState:
        """Return the present state of a known run."""
        file = known_runs()[run]
        with self._turn:
            if (run, file) not in self._views:
                self._views[run, file] = RunView(run, file)
            return read_state(self._views[run, file])


def known_runs() -> dict[str, Path | None]:
    """Return the runs of this project with their configuration files, by name.

    A name that is not a run's counts as none: it would lead out of results/.
    """
    found: dict[str, Path | None] = dict.fromkeys(runs_here())
    for file in sorted(CONFIGS.glob("*.yaml")):
        run = _run_of(file, stamp_of(file))
        if run is not None and found.get(run) is None:
            found[run] = file
    return {run: found[run] for run in sorted(found) if NAME.fullmatch(run)}


@lru_cache(maxsize=1024)
def _run_of(file: Path, stamp: object) -> str | None:
    """Read a file's run once for each version of it: pages ask every two seconds."""
    return run_of(file)


def check_run(run: str) -> str:
    """Check that a run of this name exists.

    Raises:
        PipelineError: it does not.
    """
    known = known_runs()
    if run not in known:
        raise PipelineError(
            f"there is no run {run[:100]!r} in this project",
            hint=f"runs here: {', '.join(known) or 'none yet'}",
        )
    return run


def find_pictures(run: str) -> list[Picture]:
    """List the pictures of a run, the oldest first; what links out of its folder is left out."""
    folder = RunFolder(run).path
    inside = folder.resolve()
    found = []
    phases = RunView(run, folders=phase_folders(run)).phases
    for file in [file for phase in phases for file in phase.pictures]:
        try:
            if file.resolve().is_relative_to(inside) and file.is_file():
                found.append((file.stat().st_mtime_ns, file))
        except OSError:  # removed meanwhile
            continue
    return [
        Picture(number, file.relative_to(folder).parts[0], _title(file), version, file)
        for number, (version, file) in enumerate(sorted(found))
    ]


def _title(file: Path) -> str:
    number = file.stem.removeprefix("step-")
    return (
        f"samples of step {int(number):,}" if number.isdecimal() else "grid of the exported weights"
    )
