"""The curves of a run: its whole log with spans and switches, and a log that still grows."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean, linear_regression, stdev
from typing import IO, Any, Literal, NamedTuple

from zerotrain.machine.regular_file import open_to_read
from zerotrain.training.reporting.log_lines import Line, read_line

JUMP_LINES = 10
"""Most lines of the log on each side of a switch whose losses are compared."""
LEAST_LINES = 4
"""Fewest lines on each side from which a jump is distinguished from noise."""
NOISE = 3.0
"""Standard errors within which a jump counts as noise."""
ENGINE = {
    "preset": "preset",
    "engine": "engine",
    "zero_stage": "zero_stage",
    "offload_optimizer": "offload_optimizer",
    "offload_param": "offload_param",
    "num_processes": "world_size",
    "mixed_precision": "mixed_precision",
    "global_batch_size": "global_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
}
"""Values of a launch that a switch may change, by their keys in run.yaml, each with its key in the
manifest of a state."""
WHOLE_BYTES = 4 * 2**20
"""Size up to which a growing log is read as a whole: about 9,000 lines."""
TAIL_BYTES = 2**18
"""End of a longer log that is read as a whole; of the lines before it only some are read."""
SAMPLED_LINES = 400
LONGEST_LINE = 2**14
"""Bytes of a line of about 600 processes, which has the memory of each."""
MOST_POINTS = 2000
"""An even number."""
PACE_LINES = 20
"""Number of the newest lines over which the pace is measured."""
SECONDS = "seconds_"


Verdict = Literal["too few lines", "noise", "jump"]


class Point(NamedTuple):
    """A place of a curve."""

    step: int
    seconds: float
    """Training time up to there, over the phases of the log."""
    value: float


class Span(NamedTuple):
    """The steps of a phase."""

    phase: str
    first: int
    """The step before its first one."""
    last: int


@dataclass(frozen=True)
class Side:
    """The training loss of the lines of the log on one side of a switch, and a straight line
    through them."""

    mean: float
    spread: float
    """Standard deviation; NaN for a single line of the log."""
    lines: int
    edge: float
    """Where the straight line is at the switch; NaN for fewer than LEAST_LINES."""
    edge_error: float
    """Standard error of `edge`."""

    @classmethod
    def of(cls, losses: Sequence[tuple[float, float]]) -> Side | None:
        """Measure losses; None without any.

        Args:
            losses: Steps from the switch, negative before it, and the loss there.
        """
        if not losses:
            return None
        places, values = zip(*losses, strict=True)
        spread = stdev(values) if len(values) > 1 else math.nan
        edge, error = _intercept(places, values)
        return cls(fmean(values), spread, len(values), edge, error)


@dataclass(frozen=True)
class Jump:
    """The training loss on both sides of a switch."""

    before: Side
    after: Side

    @property
    def size(self) -> float:
        """Return the difference of the straight lines at the switch; NaN for too few lines."""
        return self.after.edge - self.before.edge

    @property
    def error(self) -> float:
        """Return the standard error of `size`."""
        return math.hypot(self.before.edge_error, self.after.edge_error)

    @property
    def verdict(self) -> Verdict:
        """Return whether `size` exceeds NOISE standard errors, or the precision of a float."""
        if math.isnan(self.size):
            return "too few lines"
        least = NOISE * self.error + 1e-9 * abs(self.before.mean)
        return "noise" if abs(self.size) <= least else "jump"


@dataclass(frozen=True)
class Switch:
    """The place where a phase continues the one before."""

    step: int
    """The last step before it."""
    before: str
    """Name of the phase that ends."""
    after: str
    """Name of the phase that begins."""
    changes: Mapping[str, tuple[Any, Any]]
    """Old and new values by the keys of ENGINE; empty if equal, or not recorded on both sides."""
    jump: Jump | None
    """None if a side has no line with a loss."""


@dataclass(frozen=True)
class Curves:
    """The log of a run or of a phase, in the order of steps."""

    lines: Sequence[Line]
    """All lines: of steps, of epochs and of validations."""
    engines: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Values by the keys of ENGINE that each phase was trained with; phases without records are
    missing."""

    @cached_property
    def steps(self) -> list[Line]:
        """Return the lines of steps: "loss", "grad_norm", "learning_rate", "seconds", ..."""
        return [line for line in self.lines if "loss" in line]

    @cached_property
    def spans(self) -> list[Span]:
        """Return the steps of each phase."""
        spans: list[Span] = []
        for line in self.steps:
            if spans and spans[-1].phase == line["phase"]:
                spans[-1] = spans[-1]._replace(last=line["step"])
            else:
                spans.append(Span(line["phase"], spans[-1].last if spans else 0, line["step"]))
        return spans

    @cached_property
    def switches(self) -> list[Switch]:
        """Return the switches between phases, in order."""
        pairs = zip(self.spans, self.spans[1:], strict=False)
        return [self._switch(before, after) for before, after in pairs]

    def of_phase(self, phase: str) -> list[Line]:
        """Return the lines of a phase's steps."""
        return [line for line in self.steps if line["phase"] == phase]

    @cached_property
    def seconds(self) -> list[float]:
        """Return the training time at each line, over all phases."""
        times, before, now, phase = [], 0.0, 0.0, None
        for line in self.lines:
            if line["phase"] != phase:
                phase, before, now = line["phase"], before + now, 0.0
            now = float(line.get("seconds", now))
            times.append(before + now)
        return times

    def points(self, key: str) -> list[Point]:
        """Return the points of the lines that have a number under a key."""
        return [
            Point(line["step"], seconds, float(line[key]))
            for line, seconds in zip(self.lines, self.seconds, strict=True)
            if isinstance(line.get(key), (int, float))
        ]

    def series(self, key: str, phase: str | None = None) -> list[tuple[int, float]]:
        """Return step and value of the lines that have a number under a key.

        Args:
            key: The key.
            phase: The phase whose lines are meant; None: all.
        """
        return [
            (line["step"], float(line[key]))
            for line in self.lines
            if isinstance(line.get(key), (int, float)) and phase in (None, line["phase"])
        ]

    def _switch(self, before: Span, after: Span) -> Switch:
        old, new = (self.engines.get(span.phase, {}) for span in (before, after))
        known = [key for key in ENGINE if key in old and key in new]
        changes = {key: (old[key], new[key]) for key in known if old[key] != new[key]}
        left = Side.of(self._losses(before, before.last)[-JUMP_LINES:])
        right = Side.of(self._losses(after, before.last)[:JUMP_LINES])
        jump = Jump(left, right) if left and right else None
        return Switch(before.last, before.phase, after.phase, changes, jump)

    def _losses(self, span: Span, origin: int) -> list[tuple[float, float]]:
        """Return the losses of a phase at the middle of the steps of their line."""
        found = []
        last = span.first
        for line in self.of_phase(span.phase):
            if line["loss"] is not None:  # as it is if every update was skipped
                found.append(((last + line["step"]) / 2 - origin, float(line["loss"])))
            last = line["step"]
        return found


def _intercept(places: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """Return value and standard error at place 0 of the least squares line through points."""
    count = len(places)
    if count < LEAST_LINES:
        return math.nan, math.nan
    slope, edge = linear_regression(places, values)
    rest = sum((v - edge - slope * p) ** 2 for p, v in zip(places, values, strict=True))
    middle = fmean(places)
    across = sum((place - middle) ** 2 for place in places)
    return edge, math.sqrt(rest / (count - 2) * (1 / count + middle**2 / across))


class ThinCurve:
    """Values by step, at most MOST_POINTS: of more, each point is the mean of 2, 4, ... values."""

    def __init__(self) -> None:
        self.points: list[tuple[int, float]] = []
        self._each = self._in_last = 1
        """Values of a point, and of the last one so far."""

    def add(self, step: int, value: float) -> None:
        """Add a value; a step that was there before begins the curve again from that step."""
        while self.points and self.points[-1][0] >= step:
            self.points.pop()
            self._in_last = self._each
        if self.points and self._in_last < self._each:
            self._in_last += 1
            mean = self.points[-1][1]
            self.points[-1] = step, mean + (value - mean) / self._in_last
            return
        self.points.append((step, value))
        self._in_last = 1
        if len(self.points) > MOST_POINTS:
            pairs = zip(self.points[:-1:2], self.points[1:-1:2], strict=True)
            self.points = [(b[0], (a[1] + b[1]) / 2) for a, b in pairs] + self.points[-1:]
            self._each *= 2


class GrowingLog:
    """A log of which each call reads only what was appended since the one before."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._clear()

    def _clear(self) -> None:
        self._offset, self._last = 0, b""
        self.loss, self.val_loss = ThinCurve(), ThinCurve()
        self.phase_starts: list[tuple[int, str]] = []
        """The step after which each phase begins, with its name; of the first its first logged one.
        """
        self.newest: dict[str, Any] = {}
        """The newest line of a training step."""
        self._paces: deque[tuple[int, float]] = deque(maxlen=PACE_LINES)

    def read(self, path: Path) -> None:
        """Read what was appended; everything again if the file is another, or was cut.

        A missing file leaves nothing. Lines that are no JSON objects are skipped: the last one may
        still be being written.
        """
        try:
            with open_to_read(path) as stream:
                if path != self._path or not self._continues(stream):
                    self._clear()
                    self._path = path
                    self._skip_to_tail(stream)
                stream.seek(self._offset)
                data = stream.read()
        except OSError:
            self._clear()
            return
        whole = data[: data.rfind(b"\n") + 1]
        if whole:
            self._offset += len(whole)
            self._last = whole[-LONGEST_LINE:]
            for line in whole.splitlines():
                self._add(line)

    def steps_per_second(self) -> float | None:
        """Return the pace over the newest lines, checkpoints and validations included."""
        if len(self._paces) < 2:
            return None
        (step, seconds), (last_step, last_seconds) = self._paces[0], self._paces[-1]
        return (last_step - step) / (last_seconds - seconds)

    def time_split(self) -> dict[str, float]:
        """Return the share of each part of the newest steps, the largest first."""
        parts = {
            key.removeprefix(SECONDS): value
            for key, value in self.newest.items()
            if key.startswith(SECONDS) and isinstance(value, int | float)
        }
        whole = sum(parts.values())
        ordered = sorted(parts.items(), key=lambda one: -one[1])
        return {part: value / whole for part, value in ordered} if whole > 0 else {}

    def _continues(self, stream: IO[bytes]) -> bool:
        """Return whether the file still begins with what was read: a new start writes it again."""
        if os.fstat(stream.fileno()).st_size < self._offset:
            return False
        stream.seek(self._offset - len(self._last))
        return stream.read(len(self._last)) == self._last

    def _skip_to_tail(self, stream: IO[bytes]) -> None:
        size = os.fstat(stream.fileno()).st_size
        if size <= WHOLE_BYTES:
            return
        start = size - TAIL_BYTES
        for number in range(SAMPLED_LINES):
            stream.seek(start * number // SAMPLED_LINES)
            lines = stream.read(LONGEST_LINE).split(b"\n")
            for line in lines[1 if number else 0 : -1][:1]:
                self._add(line)
        stream.seek(start)
        self._offset = start + len(stream.readline(LONGEST_LINE))

    def _add(self, line: bytes) -> None:
        values = read_line(line)
        if values is None:
            return
        step, phase = values["step"], values["phase"]
        if isinstance(value := values.get("val_loss"), int | float):
            self.val_loss.add(step, float(value))
        if "loss" not in values:
            return
        if not self.phase_starts or self.phase_starts[-1][1] != phase:
            # The last step of a phase has a line, whatever log_every is.
            switch = self.newest["step"] if self.phase_starts else step
            self.phase_starts.append((switch, phase))
            self._paces.clear()
        if isinstance(value := values["loss"], int | float):
            self.loss.add(step, float(value))
        if isinstance(seconds := values.get("seconds"), int | float):
            if self._paces and (self._paces[-1][0] >= step or self._paces[-1][1] >= seconds):
                self._paces.clear()
            self._paces.append((step, float(seconds)))
        self.newest = values
