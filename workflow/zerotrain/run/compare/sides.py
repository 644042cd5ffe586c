"""The runs and phases that a command line names to be compared, and the facts on each: curves,
metrics, values, samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerotrain import artifact
from zerotrain.artifact import Artifact
from zerotrain.artifact.layout import RESULTS, PhaseFolder, files_of
from zerotrain.config.read import read_config
from zerotrain.config.runs import read_runs
from zerotrain.config.suggestions import after_question, join_first
from zerotrain.errors import PipelineError
from zerotrain.launch.resolved import FILES, ResolvedPhase, leaves
from zerotrain.run.curves import Curves
from zerotrain.run.phase import PhaseView
from zerotrain.run.runs import find_place, is_config, phase_folders, runs_here
from zerotrain.run.view import RunView


@dataclass(frozen=True)
class Side:
    """A run, or one phase of it."""

    name: str
    """RUN or RUN/PHASE; with the path before it if it is of another project."""
    folders: Sequence[Path]
    """Folders of its phases, in order."""
    phase: str | None = None
    """The phase, which is the last of the folders; None: the whole run."""


def find_sides(names: Sequence[str]) -> list[Side]:
    """Find what is compared, each once, in the order of the command line.

    Args:
        names: RUN, a configuration file (of one run, or of several under `runs`), RUN/PHASE, or
            the path of a folder in one of these. A single run stands for its phases.

    Raises:
        PipelineError: a name is unknown, or there is nothing to compare with.
    """
    sides = list({side.name: side for name in names for side in _find(name)}.values())
    if len(sides) == 1 and sides[0].phase is None:
        run = sides[0]
        sides = [_phase(run, place) for place in range(len(run.folders))]
    if len(sides) < 2:
        raise PipelineError(
            f"{' '.join(names)}: one phase, and nothing to compare it with",
            hint=f"name another run or phase. {_list_known()}",
        )
    return sides


def _find(name: str) -> Iterator[Side]:
    if is_config(name):
        for run in read_runs(Path(name)).values():
            yield _of_run(RESULTS, run.run, [phase.name for phase in run.phases], name)
        return
    place = find_place(name)
    if place is None:
        raise _unknown(name)
    side = _of_run(place.root, place.run, _configured(place.run) if place.is_here else [], name)
    if not place.parts:
        yield side
        return
    phase = place.parts[0]
    phases = {folder.name: number for number, folder in enumerate(side.folders)}
    if phase in phases:
        yield _phase(side, phases[phase])
    elif is_phase(folder := place.root / place.run / phase):  # the configuration has it no longer
        yield Side(f"{side.name}/{phase}", [folder], phase)
    else:
        raise _unknown(name)


def _of_run(root: Path, run: str, phases: Sequence[str], given: str) -> Side:
    """Return a run with the phases that have a folder, in order.

    Args:
        root: The results folder.
        run: Name of the run.
        phases: Names of its phases in order; empty: sort those that are there by their steps.
        given: What the user named, for messages.
    """
    folder = root / run
    there = [path for path in folder.glob("*") if is_phase(path)] if folder.is_dir() else []
    if phases:
        there = [folder / name for name in phases if folder / name in there]
    else:
        starts = {path: PhaseView(path).start for path in there}
        there.sort(key=lambda path: (starts[path] is None, starts[path] or 0, path.name))
    if not there and not folder.is_dir():
        raise _unknown(given)
    if not there:
        raise PipelineError(
            f"{given}: no phase of it has been launched",
            hint="`snakemake --cores all train` trains it. " + _list_known(),
        )
    return Side(run if root == RESULTS else str(folder), there)


def _phase(run: Side, place: int) -> Side:
    """Return a phase of a run; the phases before it are part of its log."""
    name = run.folders[place].name
    return Side(f"{run.name}/{name}", run.folders[: place + 1], name)


def is_phase(folder: Path) -> bool:
    """Return whether a phase was launched or trained in a folder."""
    phase = PhaseFolder(folder)
    return any(
        place.exists() for place in (phase.launch / "run.yaml", phase.progress, phase.checkpoint)
    )


def _configured(run: str) -> list[str]:
    """Return the phases of a run as its configuration file has them; empty without a valid one."""
    files = files_of(run)
    try:
        return [one.name for one in read_config(files[0]).phases] if len(files) == 1 else []
    except PipelineError:
        return []


def _known() -> tuple[list[str], list[str]]:
    """Return the runs and the phases that are here."""
    folders = [path for run in runs_here() for path in phase_folders(run) if is_phase(path)]
    runs = dict.fromkeys(path.parent.name for path in folders)
    return [*runs], [f"{path.parent.name}/{path.name}" for path in folders]


def _list_known() -> str:
    phases = _known()[1]
    return f"phases here: {join_first(phases) if phases else 'none'}"


def _unknown(name: str) -> PipelineError:
    runs, phases = _known()
    return PipelineError(
        f"{name}: no such run or phase in {RESULTS}",
        hint=after_question(name, [*runs, *phases], _list_known()),
    )


IN_LOG = ("step", "samples", "train_seconds")
"""Metrics that the log has for every phase."""
UNKNOWN = ("default", "")
"""Source of a value without a recorded one."""
PLACES = ("run", "phase")
"""Keys of run.yaml that name a phase."""
PHASES, OF_DATA, EVALUATION, RAN_ON = "phases", "data", "evaluate", "ran on"
"""Groups of values, in the order of the table."""
VALIDATIONS = ("val_loss", "val_loss_ema")
"""Keys of the log for the losses of a validation."""
CONDITIONS = ("device", "threads", "versions.")
"""Beginnings of the keys of a state's conditions that run.yaml does not have."""
Values = Mapping[str, Any]
"""Values by dotted key."""


@dataclass(frozen=True)
class Facts:
    """What a side has."""

    name: str
    folder: Path
    """The folder of its last phase."""
    curves: Curves
    """Of its lines of the log."""
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

    @property
    def logged(self) -> dict[str, float]:
        """Return what its log has come to: steps, samples, training time, the newest losses."""
        timed = zip(self.curves.lines, self.curves.seconds, strict=True)
        taken = [(line, seconds) for line, seconds in timed if "loss" in line]
        if not taken:
            return {}
        line, seconds = taken[-1]
        found = {key: line[key] for key in ("step", "samples") if key in line}
        found["train_seconds"] = seconds
        for key in ("loss", *VALIDATIONS):
            if points := self.curves.points(key):
                found[f"last_{key}"] = points[-1].value
                if key != "loss":
                    found[f"lowest_{key}"] = min(point.value for point in points)
        return found


def read_facts(side: Side) -> Facts:
    """Read a side as far as it has come.

    Raises:
        PipelineError: a log, a launch or an evaluation is damaged.
    """
    view = RunView(side.name, folders=side.folders)
    phases, log = view.phases, view.curves
    own = phases if side.phase is None else phases[-1:]
    lines = [line for line in log.lines if side.phase in (None, line["phase"])]
    missing = [] if lines else [f"{side.name} has no curves: nothing has been logged yet"]
    evaluated = [phase for phase in own if phase.evaluation]
    evaluation = evaluated[-1].evaluation if evaluated else None
    if evaluation is None:
        missing.append(f"{side.name} is not evaluated yet: it has neither samples nor metrics")
    elif evaluated[-1] != own[-1]:
        missing.append(
            f"{side.name}: {own[-1].name} has no evaluation yet; {evaluated[-1].name} has"
        )
    missing += [
        f"{side.name}: the values of {one.name} are unknown: {one.places.launch} is not there"
        for one in own
        if one.launch is None
    ]
    launches = [one.launch for one in own if one.launch]
    groups = _launched(launches)
    if evaluation:
        groups |= {name: [values] for name, values in _evaluated(evaluation)}
    if ran_on := _conditions(own):
        groups[RAN_ON] = [ran_on]
    return Facts(
        name=side.name,
        folder=own[-1].folder,
        curves=Curves(lines),
        metrics=_metrics(evaluated, complete=evaluated == own),
        groups=groups,
        evaluation=evaluation,
        chosen=frozenset(
            key
            for launch in launches
            for key, (source, _) in launch.sources.items()
            if source == "user"
        ),
        missing=missing,
    )


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
        values = {OF_DATA: dataset.made_by.get("data", {}), **dataset.content.get("count", {})}
        yield OF_DATA, dict(leaves(values))


def _conditions(own: Sequence[PhaseView]) -> Values:
    """Return what the newest state of a side says that it ran on; empty without one."""
    states = [phase.exported for phase in own if phase.exported]
    ran_on = states[-1].made_by.get("ran_on") if states else None
    items = ran_on.items() if isinstance(ran_on, dict) else ()
    return {key: value for key, value in items if key.startswith(CONDITIONS)}


def _metrics(evaluated: Sequence[PhaseView], *, complete: bool) -> dict[str, Any]:
    """Return the metrics of the last phase; of the others, times are added, and the peak is kept.

    Args:
        evaluated: The evaluated phases.
        complete: Whether these are all phases; otherwise the times are left out.
    """
    found: dict[str, Any] = {}
    for phase in evaluated:
        for name, value in phase.metrics.items():
            if name.endswith("_seconds"):
                found[name] = found.get(name, 0) + (value or 0)
            elif name.endswith("_bytes"):
                found[name] = max(found.get(name, 0), value or 0)
            else:
                found[name] = value
    partly = () if complete else tuple(name for name in found if name.endswith("_seconds"))
    return {name: value for name, value in found.items() if name not in (*IN_LOG, *partly)}
