"""What a run logged over its phases: lines, spans of phases, and the switches between them.

The log of a phase (metrics.jsonl) continues the log of the phase before, so the newest one holds
the run up to there. `training.reporting.log` writes it; docs/monitoring.md describes its keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, linear_regression, stdev
from typing import Any, Literal, NamedTuple

from zerotrain.artifact import RECORDS, documents, is_published, read_manifest
from zerotrain.artifact.documents import check_object, check_type, parse_json
from zerotrain.artifact.layout import PhaseFolder
from zerotrain.launch.files import read_run_yaml
from zerotrain.state.position import Count

LOG = "metrics.jsonl"
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

Line = Mapping[str, Any]
"""A line of the log: "phase" and "step", and what was measured there."""


@dataclass(frozen=True)
class LoggedStep:
    """What is computed with of a line."""

    phase: str
    step: Count
    loss: float | None = None
    """None if every update was skipped."""
    skipped: int = 0


Verdict = Literal["too few lines", "noise", "jump"]


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
class RunHistory:
    """The log of a run, in the order of steps."""

    lines: Sequence[Line]
    """All lines: of steps, of epochs and of validations."""
    engines: Mapping[str, Mapping[str, Any]]
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

    def series(self, key: str) -> list[tuple[str, int, float]]:
        """Return phase, step and value of each line that has a number under a key."""
        return [
            (line["phase"], line["step"], float(line[key]))
            for line in self.lines
            if isinstance(line.get(key), (int, float))
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


def read_history(folders: Sequence[Path]) -> RunHistory:
    """Read what a run logged.

    Args:
        folders: Folders of the run's phases (results/RUN/PHASE), in order. A phase that is not
            finished is read as far as it has come; one that has not started is left out.

    Raises:
        PipelineError: a line of a log is not an object with a phase and a step.
    """
    logs = [path for folder in folders if (path := log_of(folder))]
    engines = {folder.name: values for folder in folders if (values := _engine(folder))}
    return RunHistory(list(read_lines(logs[-1])) if logs else [], engines)


def log_of(folder: Path) -> Path | None:
    """Return the log of a phase: of its state, else of its checkpoint, else the one in progress."""
    phase = PhaseFolder(folder)
    for artifact in (phase.state, phase.checkpoint):
        if is_published(artifact) and (path := artifact / RECORDS / LOG).is_file():
            return path
    path = phase.progress / LOG
    return path if path.is_file() else None


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a log; a last line that is still being written is left out.

    Raises:
        PipelineError: a line is not an object with a phase and a step.
    """
    hint = "the log is damaged; remove that line, or train the phase again"
    for number, written in enumerate(documents.read_lines(path, hint=hint), start=1):
        if not written.endswith(b"\n"):
            return
        where = f"{path}: line {number}"
        line = check_object(parse_json(written, where, hint=hint), where, hint=hint)
        check_type(line, LoggedStep, where, hint=hint)
        yield line


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


def _engine(folder: Path) -> dict[str, Any]:
    """Return what a phase was trained with: as its state recorded it, else as it was rendered."""
    phase = PhaseFolder(folder)
    if is_published(phase.state):
        engine = read_manifest(phase.state, "state").made_by.get("engine")
        if isinstance(engine, dict):
            return {key: engine[name] for key, name in ENGINE.items() if name in engine}
    if not (path := phase.launch / "run.yaml").is_file():
        return {}
    values = {name: value for name, value, _, _ in read_run_yaml(path).explain()}
    return {key: values[key] for key in ENGINE if key in values}
