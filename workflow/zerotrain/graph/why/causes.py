"""Why stages run: each cause with the stages that have it themselves.

Stages that run only because a stage before them runs have the causes of that stage.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from zerotrain.artifact import MANIFEST
from zerotrain.artifact.recipe import NOT_SET, Difference, format_difference
from zerotrain.config.training import TrainConfig
from zerotrain.graph.artifacts import files_of
from zerotrain.graph.currency import Currency
from zerotrain.graph.terminal.reasons import (
    dataset_files,
    describe,
    describe_version,
    name_phases,
    with_defaults,
)
from zerotrain.graph.why.samples import SampleChanges, compare_samples, count, name_some
from zerotrain.run.stages import last_error
from zerotrain.training.process.ending import read_exit_record

PREPARE, TRAINING = "prepare_dataset", "train_phase"


@dataclass
class Cause:
    """A reason for which stages run, in a user's words."""

    kind: str
    """One of: samples, value, version, rule, file, not made, missing, damaged, failed, forced."""
    text: str
    having: list[Currency] = field(default_factory=list)
    """What has it itself, in the order of the graph."""
    phases: set[str] = field(default_factory=set)
    """The phases of a changed value."""


@dataclass
class Causes:
    """The causes of what runs."""

    every: list[Cause]
    samples: dict[Currency, SampleChanges]
    """What changed in a dataset."""

    def kinds(self, one: Currency) -> set[str]:
        """Return the kinds of the causes that an artifact has itself."""
        return {cause.kind for cause in self.every if one in cause.having}


def find_causes(running: Sequence[Currency], *, nothing_made: bool, quick: bool = False) -> Causes:
    """Find the causes of all that runs.

    Args:
        running: What runs, in the order of the graph.
        nothing_made: Whether that is all that a target needs.
        quick: Do not compare samples where this would take more than a moment.
    """
    found: dict[tuple[str, str], Cause] = {}
    causes = Causes([], {})
    new: list[Currency] = []
    removed: dict[str, Currency] = {}
    made = {folder for one in running for folder in one.planned.folders}
    for one in running:
        # A job that failed has lost the files that it writes outside of its folders.
        lost = [] if one.differences else one.missing_outputs
        if one.missing and not one.planned.benchmark.is_file():
            new.append(one)
            own: Sequence[tuple[str, ...]] = _failure(one)
        else:
            lost += [Path(found.key) for found in one.differences if _is_lost(found)]
            removed |= {str(path).removesuffix(f"/{MANIFEST}"): one for path in lost}
            own = [*_failure(one), *_differences(one, made, causes, quick=quick)]
        for kind, text, *phases in own:
            cause = found.setdefault((kind, text), Cause(kind, text))
            cause.phases.update(phases)
            if one not in cause.having:
                cause.having.append(one)
    causes.every = [*found.values()]
    for cause in causes.every:
        cause.text += _of_phases(cause)
    if new:
        all_new = nothing_made and len(new) == len(running)
        text = "nothing is made yet" if all_new else f"not made yet: {name_some(_places(new))}"
        causes.every.append(Cause("not made", text, new))
    if removed:
        text = f"removed: {name_some(sorted(removed))}"
        causes.every.append(Cause("missing", text, [*dict.fromkeys(removed.values())]))
    return causes


def values_of(one: Currency) -> list[Difference]:
    """List the changed values of an artifact's settings, by their keys in the configuration."""
    damaged = any(difference.kind == "file" for difference in one.differences)
    if one.planned.stage == TRAINING and damaged:
        return []  # they are what the damaged file says
    values = [difference for difference in one.differences if difference.kind == "settings"]
    if one.planned.stage == TRAINING:
        values = [_of_training(value, one.planned.phase) for value in values]
    return [each for value in values for each in with_defaults(value, one.planned.run)]


def _of_training(value: Difference, phase: str) -> Difference:
    """Return a value that a training compares, by its key in the configuration."""
    section = "train." if value.key in TrainConfig.model_fields else ""
    return replace(value, key=f"{section}{value.key}", phase=phase)


def _differences(
    one: Currency, made: Collection[Path], causes: Causes, *, quick: bool
) -> Iterator[tuple[str, ...]]:
    """Yield kind and text of each cause that an artifact has itself, and the phase of a value.

    Args:
        one: The artifact.
        made: Folders that are made again, after which it runs anyway.
        causes: Where the changes of samples go.
        quick: As of find_causes.
    """
    planned = one.planned
    again, values = [], values_of(one)
    for value in values:
        if planned.stage == TRAINING and value.key in TRAINED_FROM:
            again.append(planned.inputs[TRAINED_FROM[value.key]])
        else:
            yield "value", format_difference(value), *filter(None, [value.phase])
    for found in one.differences:
        if found.kind == "version":
            yield "version", f"{found.key}: {describe_version(found)}"
        elif found.kind == "input" and found.key in planned.inputs:
            if found.old is not NOT_SET or not values:  # else a value has it read one more
                again.append(planned.inputs[found.key])
        elif found.kind == "input":
            yield from _files(one, found, causes, quick=quick)
    if names := sorted({str(folder) for folder in again if folder not in made}):
        yield "file", f"made again since: {name_some(names)}"
    damaged = [found for found in one.differences if found.kind == "file" and not _is_lost(found)]
    if names := sorted(found.key for found in damaged):
        edited = "checkpoint edited or damaged" if planned.stage == TRAINING else "damaged"
        yield "damaged", f"{edited}: {name_some(names)}"


TRAINED_FROM = {"base": "base", "data": "cache", "start": "start"}
"""What a training compares of its inputs, by their names in the rule."""


def _files(
    one: Currency, found: Difference, causes: Causes, *, quick: bool
) -> Iterator[tuple[str, str]]:
    """Describe changed files of users; of a dataset of images its samples."""
    planned = one.planned
    if found.key == planned.stage:
        yield "file", f"not made by {planned.stage}: {planned.folders[0]}"
        return
    if planned.stage == PREPARE:
        changes = compare_samples(planned.run.data, planned.folders[0], quick=quick)
        if changes is not None and (sentences := changes.sentences()):
            causes.samples[one] = changes
            yield from (("samples", sentence) for sentence in sentences)
            return
        if quick:
            yield from (("file", text) for text in describe(replace(one, differences=[found])))
            return
    files = files_of(planned.settings).get(found.key, [])
    kinds = dataset_files(one) if planned.stage == PREPARE else {}
    made = _time(planned.folders[0] / MANIFEST)
    if values_of(one) and files and all(_time(Path(file)) <= made for file in files):
        return  # a value names other files
    if not kinds and len(files) != 1:
        some = f"of {count(len(files), 'file')} some changed: {name_some(sorted(files))}"
        yield "file", some if files else f"changed: {found.key}"
        return
    for kind, paths in (kinds or {"changed": files}).items():
        yield "file", f"{count(len(paths), 'file')} {kind}: {name_some(sorted(paths))}"


def _is_lost(found: Difference) -> bool:
    return found.kind == "file" and "missing" in str(found.new)


def _failure(one: Currency) -> list[tuple[str, ...]]:
    """Describe how a job failed or was stopped the last time, if that is what it did last."""
    planned = one.planned
    if planned.stage == TRAINING:
        record = read_exit_record(planned.folders[0].with_name("progress"))
        if record is not None and record.code:
            return [("failed", f"{planned.name} ended before: {record.reason.splitlines()[0]}")]
    if _time(planned.log) <= _time(planned.benchmark):
        return []  # it has succeeded since
    error = last_error([str(planned.log)], {}, at_end=True)
    return [("failed", f"{planned.name} failed before: {error[0]}")] if error else []


def _time(path: Path) -> float:
    return path.stat().st_mtime if path.is_file() else 0.0


def _places(new: Sequence[Currency]) -> list[str]:
    """Name the folders of what is not made: of a phase, its own."""
    folders = [(one.planned.phase, folder) for one in new for folder in one.planned.folders]
    return sorted({str(folder.parent if phase else folder) for phase, folder in folders})


def _of_phases(cause: Cause) -> str:
    """Name the phases of a changed value, unless it changed in every phase of its run."""
    every = {phase.name for phase in cause.having[0].planned.run.phases}
    return f" ({name_phases(cause.phases)})" if cause.phases and cause.phases != every else ""
