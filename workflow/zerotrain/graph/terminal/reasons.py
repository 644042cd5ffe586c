"""Why Snakemake runs a job, in a few words: how its folders differ from their recipe, or after
which jobs it runs.

Snakemake's `Reason` contains sets of files and the names of its triggers. Its text lists every
file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from zerotrain.artifact.damage import MANIFEST
from zerotrain.artifact.recipe import NOT_SET, SHOWN, Difference, format_difference
from zerotrain.config.run import RunConfig
from zerotrain.config.section import Section
from zerotrain.config.stage_settings import PrepareSettings
from zerotrain.config.suggestions import join_first
from zerotrain.data.files import DatasetFiles
from zerotrain.errors import PipelineError
from zerotrain.graph.currency import Currency

FILES_SHOWN = 3


def describe(found: Currency) -> list[str]:
    """Describe why an artifact is not current, in a few parts."""
    kinds: dict[str, list[Difference]] = {}
    for one in found.differences:
        kinds.setdefault(one.kind, []).append(one)
    return [
        *_settings(kinds.get("settings", ()), found.planned.phase, found.planned.run),
        *map(describe_version, kinds.get("version", ())),
        *_inputs(kinds.get("input", ()), found),
        *_files(kinds.get("file", ())),
    ]


def describe_version(found: Difference) -> str:
    """Describe the raised version of a stage."""
    return f"its stage has version {found.new}, {found.old} before"


def with_defaults(found: Difference, run: RunConfig) -> list[Difference]:
    """List what a changed value is with the defaults of its keys, where a side leaves them out."""
    if NOT_SET not in (found.old, found.new):
        return [found]
    *sections, name = found.key.split(".")
    try:
        place: Any = run.phase(found.phase) if found.phase else run
        for section in sections:
            place = getattr(place, section)
        default = type(place).model_fields[name].get_default(call_default_factory=True)
    except (PipelineError, AttributeError, LookupError):
        return [found]
    if isinstance(default, Section):
        default = default.model_dump(mode="json")
    is_new = found.old is NOT_SET
    pairs = _pairs(found.key, default, found.new if is_new else found.old)
    sides = ("old", "new") if is_new else ("new", "old")
    return [replace(found, key=key, **dict(zip(sides, pair, strict=True))) for key, *pair in pairs]


def _pairs(key: str, default: Any, given: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield key, default and value of what is given, inside of sections."""
    if isinstance(default, dict) and isinstance(given, dict):
        for name, value in given.items():
            yield from _pairs(f"{key}.{name}", default.get(name, NOT_SET), value)
    elif default != given:
        yield key, default, given


def name_phases(names: Iterable[str]) -> str:
    """Return `phase a` or `phases a, b`."""
    every = sorted(names)
    return f"phase{'' if len(every) == 1 else 's'} {', '.join(every)}"


def name_files(files: Iterable[Any]) -> str:
    """Name up to three files, and count the others."""
    return join_first(sorted(map(str, files)), FILES_SHOWN)


def dataset_files(found: Currency) -> dict[str, list[str]]:
    """List the files that changed since a dataset was prepared, by kind; empty if unknown."""
    settings, folder = found.planned.settings, found.planned.folders[0]
    if not isinstance(settings, PrepareSettings) or not settings.data.has_image_files:
        return {}
    changes = DatasetFiles(settings.data, folder).find_changes()
    if changes is None:
        return {}
    kinds = {"changed": changes.changed, "new": changes.new, "removed": changes.removed}
    return {kind: paths for kind, paths in kinds.items() if paths}


def _settings(found: Sequence[Difference], own: str, run: RunConfig) -> list[str]:
    every = {phase.name for phase in run.phases}
    lines: dict[str, set[str]] = {}
    for one in (each for section in found for each in with_defaults(section, run)):
        lines.setdefault(format_difference(one), set()).add(one.phase)
    named = [
        line if phases <= {"", own} or phases == every else f"{line} ({name_phases(phases - {''})})"
        for line, phases in lines.items()
    ]
    more = len(named) - SHOWN
    return named if more <= 0 else [*named[:SHOWN], f"{more} more changed"]


def _inputs(found: Sequence[Difference], currency: Currency) -> list[str]:
    lines = []
    # Another preset, or an input more or less, follows from the values that are named.
    follows = any(one.kind == "settings" for one in currency.differences)
    for one in found:
        if follows and (one.key == "preset" or NOT_SET in (one.old, one.new)):
            continue
        kinds = dataset_files(currency) if one.key == "files" else {}
        lines += [f"{kind}: {name_files(paths)}" for kind, paths in kinds.items()]
        if not kinds:
            place = currency.planned.inputs.get(one.key)
            lines.append(f"changed: {place or one.key}")
    return lines


def _files(found: Sequence[Difference]) -> list[str]:
    missing = [one.key for one in found if "missing" in str(one.new)]
    damaged = [one.key for one in found if one.key not in missing]
    lines = [f"missing: {name_files(missing)}"] if missing else []
    return lines + ([f"damaged: {name_files(damaged)}"] if damaged else [])


NEW = "not made yet"
JOBS_SHOWN = 2
LAUNCH, TRAINING = "render_launch", "train_phase"


class Reasons:
    """Why the jobs of a plan run.

    Args:
        found: What was found of each artifact before Snakemake planned.
    """

    def __init__(self, found: Sequence[Currency]) -> None:
        self._found = {str(path): one for one in found for path in one.planned.outputs}

    def of(self, job: Any) -> Currency | None:
        """Return what was found of a job's artifact; None for a target, which only names files."""
        return self._found.get(str(next(iter(job.output), "")))

    def name(self, job: Any) -> str:
        """Name a job as `train_phase RUN/PHASE`, `cache_latents DATA 512` or `report RUN`."""
        found = self.of(job)
        return found.planned.name if found else job.rule.name

    def describe(self, job: Any, dag: Any) -> str:
        """Describe why a job runs."""
        reason, found = dag.reason(job), self.of(job)
        if found is None:
            return ""
        if found.missing:
            return "; ".join(self._launch(job, dag)) or NEW
        parts = describe(found)
        missing = {str(path) for path in reason.missing_output}
        if missing - {str(folder / MANIFEST) for folder in found.planned.folders}:
            parts.append(f"missing: {name_files(missing)}")
        if parts:
            return "; ".join(parts)
        if reason.forced:
            return "forced, or interrupted before"
        after = self._launch(job, dag) or self._after(job, dag)
        if after:
            return "; ".join(after)
        return "its rule was edited" if reason.code_changed else "its inputs changed"

    def _launch(self, job: Any, dag: Any) -> list[str]:
        """List the values for which a training's launch files are rendered again."""
        if job.rule.name != TRAINING:
            return []
        launches = (self.of(one) for one in dag.dependencies[job] if one.rule.name == LAUNCH)
        return next((describe(one) for one in launches if one and one.differences), [])

    def _after(self, job: Any, dag: Any) -> list[str]:
        """Return the last of its running predecessors."""
        updated = dag.reason(job).updated_input_run
        before = {one for one, files in dag.dependencies[job].items() if files & updated}
        last = before - {earlier for one in before for earlier in _ancestors(one, dag)}
        names = sorted(map(self.name, last))
        return [f"after {join_first(names, JOBS_SHOWN)}"] if names else []


def made_by(job: Any) -> str:
    """List a job's outputs, with a folder for its manifest."""
    made = (str(Path(path).parent if Path(path).name == MANIFEST else path) for path in job.output)
    return ", ".join(dict.fromkeys(made))


def is_stage(rule: Any) -> bool:
    """Return whether a rule runs a command; a target only names files."""
    return not rule.norun


def _ancestors(job: Any, dag: Any) -> set[Any]:
    found: set[Any] = set()
    waiting = list(dag.dependencies[job])
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += dag.dependencies[one]
    return found
