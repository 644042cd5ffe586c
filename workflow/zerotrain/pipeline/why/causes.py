"""Why stages run: the causes in Snakemake's plan, each with the jobs that have it themselves.

Jobs that run only because a job before them runs have no cause of their own; they have those of the
jobs before them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from zerotrain.artifact import MANIFEST
from zerotrain.artifact.layout import RESULTS
from zerotrain.config.read import read_config
from zerotrain.config.run import RunConfig
from zerotrain.config.stage_settings import SETTINGS
from zerotrain.pipeline.graph.versions import version_change
from zerotrain.pipeline.job_files import last_error
from zerotrain.pipeline.kept_jobs import LONG_AGO
from zerotrain.pipeline.rebuild import TRAINING
from zerotrain.pipeline.terminal.changes import NOT_SET, Change, format_change, name_phases
from zerotrain.pipeline.terminal.reasons import (
    changed_files,
    describe_versions,
    find_value_changes,
    is_stage,
    job_name,
)
from zerotrain.pipeline.why.samples import (
    SampleChanges,
    compare_samples,
    count,
    name_some,
)
from zerotrain.training.process.ending import read_exit_record

PREPARE = "prepare_dataset"
FOLDERS = "folders"
"""The parameter of the report that lists its phases' folders."""
DAMAGED = " (damaged)"
"""What zerotrain.pipeline.rebuild appends to a damaged file's name."""


@dataclass
class Cause:
    """A reason for which stages run, in a user's words."""

    kind: str
    """One of: samples, value, version, rule, file, not made, missing, damaged, failed, interrupted,
    forced, environment, other."""
    text: str
    jobs: list[Any] = field(default_factory=list)
    """The jobs that have it themselves, in the order of the graph."""
    phases: set[str] = field(default_factory=set)
    """The phases of a changed value."""
    followers: list[Any] = field(default_factory=list)
    """All jobs that run for it, these included."""


@dataclass
class Plan:
    """The planned jobs and the causes of each."""

    jobs: list[Any]
    """Planned stages, in the order of the graph."""
    causes: list[Cause]
    samples: dict[str, SampleChanges]
    """What changed in a dataset, by the manifest of its folder."""
    values: dict[Any, list[Change]]
    """The changed values of each job."""
    configs: dict[str, RunConfig] = field(default_factory=dict)
    """The runs by their files."""

    def config_of(self, job: Any) -> RunConfig:
        """Return the run of a job, of a rule that takes the configuration."""
        file = job.params["config_file"]
        if file not in self.configs:
            self.configs[file] = read_config(Path(file))
        return self.configs[file]


def find_causes(dag: Any, reasons: Mapping[Any, str] | None = None) -> Plan:
    """Find the causes of all jobs in Snakemake's plan.

    Args:
        dag: Snakemake's graph, after zerotrain.pipeline.hooks have changed it.
        reasons: For a quick look, each job's reason as describe_reason returns it, to use where
            comparing the samples would take more than a moment.
    """
    jobs = [
        job
        for level in dag.toposorted()
        for job in sorted(level, key=lambda job: (job.rule.name, str(job.output)))
        if is_stage(job.rule) and dag.needrun(job)
    ]
    plan = Plan(jobs, [], {}, {})
    found: dict[tuple[str, str], Cause] = {}
    new = [job for job in jobs if _is_new(job, dag)]
    for job in jobs:
        for kind, text, *phase in _own(job, dag, plan, reasons):
            cause = found.setdefault((kind, text), Cause(kind, text))
            cause.phases.update(phase)
            if job not in cause.jobs:
                cause.jobs.append(job)
    if new:
        found["not made", ""] = Cause("not made", _describe_new(new, dag), new)
    for cause in found.values():
        cause.text += _of_phases(cause, plan)
    missing = [one for one in found.values() if one.kind == "missing"]
    plan.causes = [one for one in found.values() if one.kind != "missing"]
    if missing:
        names = sorted(one.text for one in missing)
        plan.causes.append(Cause("missing", f"removed: {name_some(names)}", _jobs_of(missing)))
    _add_followers(plan, dag)
    return plan


def _own(
    job: Any, dag: Any, plan: Plan, reasons: Mapping[Any, str] | None
) -> Iterator[tuple[str, ...]]:
    """Yield kind and text of each cause that a job has itself, and the phase of a value."""
    reason = dag.reason(job)
    if _is_interrupted(job, dag):
        yield "interrupted", f"was interrupted: {job_name(job)}"
    elif reason.forced:
        yield "forced", "asked for by --force, --forceall or --forcerun"
    if _is_new(job, dag):
        yield from _failure(job)
        return
    plan.values[job] = [*_by_key(job, find_value_changes(job, dag))]
    for change in plan.values[job]:
        yield "value", format_change(change), *filter(None, [change.phase])
    if not reason.missing_output and (raised := version_change(dag.workflow.persistence, job)):
        yield "version", f"{job.rule.name}: {describe_versions(*raised)}"
    elif reason.code_changed:
        yield "rule", f"{job.rule.name}: its rule was edited"
    if any(_is_stale(path) for path in job.output):
        yield from _failure(job) or [("failed", f"failed or was stopped before: {job_name(job)}")]
    else:
        yield from _inputs(job, dag, plan, reasons)
    if reason.software_stack_changed:
        yield "environment", "the environment changed"
    yield from _missing(job, reason)


def _is_interrupted(job: Any, dag: Any) -> bool:
    """Return whether the last start of a job did not end; Snakemake forces it then."""
    persistence = dag.workflow.persistence
    keys = [persistence._get_key(path) for path in job.output]
    return bool(persistence._filter_incomplete_keys(keys))


def _is_new(job: Any, dag: Any) -> bool:
    """Return whether a job has never made any of its outputs, as far as is recorded."""
    missing = set(map(str, dag.reason(job).missing_output))
    return missing == set(map(str, job.output)) and not any(
        dag.workflow.persistence.metadata(path) for path in job.output
    )


def _describe_new(new: list[Any], dag: Any) -> str:
    if len(new) == sum(is_stage(job.rule) for job in dag.jobs):
        return "nothing is made yet"
    folders = {
        str(path.parents[1] if "phase" in job.wildcards.keys() else path.parent)  # noqa: SIM118
        for job in new
        for path in map(Path, map(str, job.output))
        if path.name == MANIFEST
    }
    return f"not made yet: {name_some(sorted(folders))}"


def _by_key(job: Any, changes: Iterable[Change]) -> Iterator[Change]:
    """Name changed parameters by their keys in the configuration.

    New phases are left out: their results are not made yet.
    """
    kind = SETTINGS.get(job.rule.name)
    places = kind.paths(recorded=True) if kind else {}
    for change in changes:
        if change.old is NOT_SET and change.new is None:
            continue
        if change.key == FOLDERS:
            names = [[Path(one).name for one in value] for value in (change.old, change.new)]
            if not {*names[0]} <= {*names[1]}:
                yield Change("phases", ", ".join(names[0]), ", ".join(names[1]))
            continue
        if change.key == "phase" and change.old is NOT_SET:
            continue
        name, *rest = change.key.split(".")
        place = re.sub(r"^phases?\.(0\.)?", "", places.get(name, name))
        yield replace(change, key=".".join([place, *rest]))


def _of_phases(cause: Cause, plan: Plan) -> str:
    """Name the phases of a changed value, unless it changed in every phase of its run."""
    if not cause.phases:
        return ""
    every = {phase.name for phase in plan.config_of(cause.jobs[0]).phases}
    if cause.phases == every:
        return ""
    return f" ({name_phases(cause.phases)})"


def _inputs(
    job: Any, dag: Any, plan: Plan, reasons: Mapping[Any, str] | None
) -> Iterator[tuple[str, str]]:
    """Describe changed inputs that no planned job makes."""
    reason = dag.reason(job)
    if job.rule.name == PREPARE and (reason.updated_input or reason.input_changed):
        output, data = str(job.output[0]), plan.config_of(job).data
        changes = compare_samples(data, Path(output).parent, quick=reasons is not None)
        if changes is not None and (sentences := changes.sentences()):
            plan.samples[output] = changes
            yield from (("samples", sentence) for sentence in sentences)
            return
        if reasons is not None:
            yield "file", reasons[job]
            return
    kinds = changed_files(job, dag, only_content=bool(plan.values[job]))
    for kind, paths in kinds.items():
        made = [path for path in paths if path.startswith(f"{RESULTS}/")]
        if made and kind == "changed":  # others are those of phases that were added or removed
            folders = sorted({str(Path(path).parent) for path in made})
            yield "file", f"made again since: {name_some(folders)}"
        if others := sorted(set(paths) - set(made)):
            yield "file", f"{count(len(others), 'file')} {kind}: {name_some(others)}"


def _started(job: Any, dag: Any) -> float | None:
    """Return when the job last started, in seconds; None if that is not recorded."""
    records = map(dag.workflow.persistence.metadata, job.output)
    times = [one.starttime for one in records if one and one.starttime]
    return min(times) if times else None


def _missing(job: Any, reason: Any) -> Iterator[tuple[str, str]]:
    """Describe removed and damaged results."""
    every = sorted(map(str, reason.missing_output))
    damaged = [path.removesuffix(DAMAGED) for path in every if path.endswith(DAMAGED)]
    missing = [path for path in every if not path.endswith(DAMAGED)]
    yield from (("missing", path.removesuffix(f"/{MANIFEST}")) for path in missing)
    if damaged and job.rule.name == TRAINING:
        yield "damaged", f"checkpoint edited or damaged: {name_some(damaged)}"
    elif damaged:
        yield "damaged", f"damaged: {name_some(damaged)}"


def _is_stale(path: Any) -> bool:
    """Return whether a failed job has left this earlier result."""
    try:
        return os.stat(path).st_mtime == LONG_AGO[1]
    except OSError:
        return False


def _failure(job: Any) -> list[tuple[str, str]]:
    """Describe how the job failed or was stopped the last time, if that is what it did last."""
    if job.rule.name == TRAINING:
        record = read_exit_record(Path(job.params["progress"]))
        if record is not None and record.code:
            return [("failed", f"{job_name(job)} ended before: {record.reason.splitlines()[0]}")]
    error = last_error([str(path) for path in job.log], {}, at_end=True)
    return [("failed", f"{job_name(job)} failed before: {error[0]}")] if error else []


def _jobs_of(causes: Iterable[Cause]) -> list[Any]:
    return [*dict.fromkeys(job for cause in causes for job in cause.jobs)]


def _add_followers(plan: Plan, dag: Any) -> None:
    """Give each cause the jobs that run after those that have it."""
    places = {job: place for place, job in enumerate(plan.jobs)}
    for cause in plan.causes:
        reached: set[Any] = set()
        waiting = [*cause.jobs]
        while waiting:
            job = waiting.pop()
            if job not in reached:
                reached.add(job)
                waiting += _after(job, dag, places)
        cause.followers = sorted(reached, key=places.__getitem__)
    known = {job for cause in plan.causes for job in cause.followers}
    if rest := [job for job in plan.jobs if job not in known]:
        plan.causes.append(Cause("other", "the inputs changed", rest, followers=rest))


def _after(job: Any, dag: Any, planned: Iterable[Any]) -> Iterator[Any]:
    """List the planned jobs that run because this one does."""
    for one, files in dag.depending[job].items():
        if one in planned and files & dag.reason(one).updated_input_run:
            yield one
