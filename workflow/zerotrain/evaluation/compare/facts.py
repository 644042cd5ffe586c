"""The facts on a side of a comparison, read from its folders: curves, metrics, values, samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from zerotrain import artifact
from zerotrain.artifact import Artifact
from zerotrain.artifact.layout import PhaseFolder
from zerotrain.evaluation.compare.sides import Side
from zerotrain.evaluation.history import Line, read_history
from zerotrain.evaluation.results import read_metrics
from zerotrain.launch.files import read_run_yaml
from zerotrain.launch.resolved import FILES, ResolvedPhase, leaves

GRID, METRICS = "grid.png", "metrics.json"
IN_LOG = ("step", "samples", "train_seconds")
"""Metrics that the log has for every phase."""
UNKNOWN = ("default", "")
"""Source of a value without a recorded one."""
PLACES = ("run", "phase")
"""Keys of run.yaml that name a phase."""
PHASES, DATA, EVALUATION, RAN_ON = "phases", "data", "evaluate", "ran on"
"""Groups of values, in the order of the table."""
VALIDATIONS = ("val_loss", "val_loss_ema")
"""Keys of the log for the losses of a validation."""
CONDITIONS = ("device", "threads", "versions.")
"""Beginnings of the keys of a state's conditions that run.yaml does not have."""
Values = Mapping[str, Any]
"""Values by dotted key."""


class Point(NamedTuple):
    """A place of a curve."""

    step: int
    seconds: float
    """Training time up to there, over the phases of the side."""
    value: float


@dataclass(frozen=True)
class Facts:
    """What a side has."""

    name: str
    folder: Path
    """The folder of its last phase."""
    lines: Sequence[Line]
    """Its lines of the log."""
    metrics: Values
    """Of its last evaluated phase, by the names of metrics.json; empty without any."""
    groups: Mapping[str, Sequence[Values]]
    """The values by group: those of each phase for PHASES and the launch files, and one mapping for
    the others. A group that is not recorded is missing."""
    evaluation: Artifact | None
    chosen: frozenset[str] = frozenset()
    """Keys of the launch files that the user set."""
    missing: Sequence[str] = field(default_factory=list)
    """What it has not, in sentences."""

    @cached_property
    def seconds(self) -> list[float]:
        """Return the training time at each line."""
        times, before, now, phase = [], 0.0, 0.0, None
        for line in self.lines:
            if line["phase"] != phase:
                phase, before, now = line["phase"], before + now, 0.0
            now = float(line.get("seconds", now))
            times.append(before + now)
        return times

    def curve(self, key: str) -> list[Point]:
        """Return the points of the lines that have a number under a key of the log."""
        return [
            Point(line["step"], seconds, float(line[key]))
            for line, seconds in zip(self.lines, self.seconds, strict=True)
            if isinstance(line.get(key), (int, float))
        ]

    @property
    def logged(self) -> dict[str, float]:
        """Return what its log has come to: steps, samples, training time, the newest losses."""
        taken = [
            (line, s) for line, s in zip(self.lines, self.seconds, strict=True) if "loss" in line
        ]
        if not taken:
            return {}
        line, seconds = taken[-1]
        found = {key: line[key] for key in ("step", "samples") if key in line}
        found["train_seconds"] = seconds
        for key in ("loss", *VALIDATIONS):
            if points := self.curve(key):
                found[f"last_{key}"] = points[-1].value
                if key != "loss":
                    found[f"lowest_{key}"] = min(point.value for point in points)
        return found


def read_facts(side: Side) -> Facts:
    """Read a side as far as it has come.

    Raises:
        PipelineError: a log, a launch or an evaluation is damaged.
    """
    history = read_history(side.folders)
    own = side.folders if side.phase is None else side.folders[-1:]
    lines = [line for line in history.lines if side.phase in (None, line["phase"])]
    missing = [] if lines else [f"{side.name} has no curves: nothing has been logged yet"]
    evaluated = [folder for folder in own if artifact.is_published(folder / "evaluation")]
    evaluation = artifact.read(evaluated[-1] / "evaluation", "evaluation") if evaluated else None
    if evaluation is None:
        missing.append(f"{side.name} is not evaluated yet: it has neither samples nor metrics")
    elif evaluated[-1] != own[-1]:
        missing.append(
            f"{side.name}: {own[-1].name} has no evaluation yet; {evaluated[-1].name} has"
        )
    phases = {folder.name: phase for folder in own if (phase := _launch(folder))}
    missing += [
        f"{side.name}: the values of {folder.name} are unknown: {folder / 'launch'} is not there"
        for folder in own
        if folder.name not in phases
    ]
    groups = _launched(list(phases.values()))
    if evaluation:
        groups |= {name: [values] for name, values in _evaluated(evaluation)}
    if ran_on := _conditions(own):
        groups[RAN_ON] = [ran_on]
    return Facts(
        name=side.name,
        folder=own[-1],
        lines=lines,
        metrics=_metrics(evaluated, complete=evaluated == own),
        groups=groups,
        evaluation=evaluation,
        chosen=frozenset(
            key
            for phase in phases.values()
            for key, (source, _) in phase.sources.items()
            if source == "user"
        ),
        missing=missing,
    )


def _launch(folder: Path) -> ResolvedPhase | None:
    """Return the resolved values of a phase; None if it was launched by hand."""
    path = PhaseFolder(folder).launch / "run.yaml"
    return read_run_yaml(path) if path.is_file() else None


def _launched(phases: Sequence[ResolvedPhase]) -> dict[str, Sequence[Values]]:
    """Return the values of each phase: its own, and those of its launch files.

    Left out are the names of run and phase, and what follows from other values in the launch files.
    """
    groups: dict[str, list[Values]] = {}
    for phase in phases:
        own = phase.values()
        files = {file: {file: own.pop(file)} for file in FILES}
        for group, section in {PHASES: own, **files}.items():
            values = {
                key: value
                for key, value in (section.items() if group == PHASES else leaves(section))
                if key not in PLACES
                if group == PHASES
                or (value != {} and phase.sources.get(key, UNKNOWN)[0] != "derived")
            }
            if values:
                groups.setdefault(group, []).append(values)
    return dict(groups)


def _evaluated(evaluation: Artifact) -> Iterator[tuple[str, Values]]:
    """Yield the values of an evaluation, and of the data behind it if that is still here."""
    yield EVALUATION, dict(leaves({EVALUATION: evaluation.content.get("evaluate", {})}))
    parent = evaluation.parents.get("dataset")
    if parent is None or not artifact.is_published(folder := Path(parent["path"])):
        return
    dataset = artifact.read(folder, "dataset", verify=False)
    if dataset.identity == parent["identity"]:
        values = {DATA: dataset.made_by.get("data", {}), **dataset.content.get("count", {})}
        yield DATA, dict(leaves(values))


def _conditions(own: Sequence[Path]) -> Values:
    """Return what the newest state of a side says that it ran on; empty without one."""
    states = [state for folder in own if artifact.is_published(state := PhaseFolder(folder).state)]
    if not states:
        return {}
    ran_on = artifact.read(states[-1], "state", verify=False).made_by.get("ran_on")
    items = ran_on.items() if isinstance(ran_on, dict) else ()
    return {key: value for key, value in items if key.startswith(CONDITIONS)}


def _metrics(evaluated: Sequence[Path], *, complete: bool) -> dict[str, Any]:
    """Return the metrics of the last phase; of the others, times are added, and the peak is kept.

    Args:
        evaluated: The evaluated phases.
        complete: Whether these are all phases; otherwise the times are left out.
    """
    found: dict[str, Any] = {}
    for folder in evaluated:
        path = folder / METRICS
        if not path.is_file():
            continue
        for name, value in read_metrics(path).items():
            if name.endswith("_seconds"):
                found[name] = found.get(name, 0) + (value or 0)
            elif name.endswith("_bytes"):
                found[name] = max(found.get(name, 0), value or 0)
            else:
                found[name] = value
    partly = () if complete else tuple(name for name in found if name.endswith("_seconds"))
    return {name: value for name, value in found.items() if name not in (*IN_LOG, *partly)}
