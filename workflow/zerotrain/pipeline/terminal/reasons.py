"""Why Snakemake runs a job, in a few words: changed keys with both values, files by name and count.

Snakemake's `Reason` contains sets of files and the names of its triggers. Its text lists every
file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from zerotrain.artifact.layout import DATA, RESULTS
from zerotrain.config.suggestions import join_first
from zerotrain.pipeline.graph.versions import PARAMETER, is_version, version_change
from zerotrain.pipeline.job_files import find_dataset_changes
from zerotrain.pipeline.terminal.changes import Change, describe_changes, find_changes

NEW = "not made yet"
FILES_SHOWN = 3
JOBS_SHOWN = 2
LAUNCH, TRAINING = "render_launch", "train_phase"


def job_name(job: Any) -> str:
    """Name a job as `train_phase RUN/PHASE`, `cache_latents DATA 512` or `report RUN`."""
    return " ".join(filter(None, [job.rule.name, _subject(job)]))


def describe_reason(job: Any, dag: Any) -> str:
    """Describe why a job runs, reading only Snakemake's plan."""
    reason = dag.reason(job)
    if reason.forced:
        return "forced"
    values = _changed_values(job, dag)
    found = [
        *values,
        *_changed_code(job, dag),
        *_changed_inputs(job, dag, only_content=bool(values)),
        *(["its environment changed"] if reason.software_stack_changed else []),
        *_missing(job, reason),
        *(["was interrupted"] if reason._incomplete_output else []),
    ]
    if NEW in found:
        found = _launch_changes(job, dag) or [NEW]
    return "; ".join(found or _launch_changes(job, dag) or _after(job, dag)) or "its inputs changed"


def made_by(job: Any) -> str:
    """List a job's outputs, with a folder for its manifest."""
    made = (
        str(Path(path).parent if Path(path).name == "manifest.json" else path)
        for path in job.output
    )
    return ", ".join(dict.fromkeys(made))


def is_stage(rule: Any) -> bool:
    """Return whether a rule runs a command; a target only names files."""
    return not rule.norun


def name_files(files: Iterable[Any]) -> str:
    """Name up to three files, and count the others."""
    return join_first(sorted(map(str, files)), FILES_SHOWN)


def _subject(job: Any) -> str:
    parts = Path(str(job.output[0])).parts if job.output else ()
    if len(parts) < 3 or parts[:1] != RESULTS.parts:
        return ""
    subject = parts[2] if parts[1] == DATA else parts[1]
    phase = job.wildcards.get("phase")
    own = [job.wildcards.get(name) for name in ("size", "shard")]
    return " ".join([subject + (f"/{phase}" if phase else ""), *filter(None, own)])


def _changed_values(job: Any, dag: Any) -> list[str]:
    found = _compared_values(job, dag)
    if found is None:
        return []
    return describe_changes(*found, job.wildcards.get("phase")) or ["its parameters changed"]


def find_value_changes(job: Any, dag: Any) -> list[Change]:
    """Find the configuration's values that changed since a job last ran."""
    found = _compared_values(job, dag)
    return find_changes(*found) if found else []


def _compared_values(job: Any, dag: Any) -> tuple[list[str], dict[str, Any]] | None:
    """Return a job's recorded values and its present ones by name; None if they are equal."""
    # If an input is newer, Snakemake has not compared the values.
    persistence = dag.workflow.persistence
    changed = persistence.params_changed(job)
    if not changed or all(map(is_version, changed.only_old | changed.only_new)):
        return None
    values = list(persistence._params(job))
    current = {}
    for name, value in job.params.items():
        if repr(value) in values:  # values that follow from inputs or outputs are not recorded
            values.remove(repr(value))
            current[name] = value
    current.pop(PARAMETER, None)
    return [one for one in _recorded(persistence.params, job) or [] if not is_version(one)], current


def _recorded(read: Callable[[str], Any], job: Any) -> Any:
    """Return Snakemake's record for the first of a job's outputs that has one."""
    return next((found for path in job.output if (found := read(path))), None)


def _changed_code(job: Any, dag: Any) -> list[str]:
    """Report another version of a job's stage, and an edit of its rule."""
    reason = dag.reason(job)
    if not reason.missing_output and (change := version_change(dag.workflow.persistence, job)):
        return [describe_versions(*change)]
    return ["its rule was edited"] if reason.code_changed else []


def describe_versions(old: int | None, new: int) -> str:
    """Describe the raised version of a stage."""
    return f"its stage has version {new}" + (f", {old} before" if old is not None else "")


def _changed_inputs(job: Any, dag: Any, *, only_content: bool) -> list[str]:
    kinds = changed_files(job, dag, only_content=only_content)
    return [f"{kind}: {name_files(paths)}" for kind, paths in kinds.items()]


def changed_files(job: Any, dag: Any, *, only_content: bool) -> dict[str, set[str]]:
    """List a job's changed files, and if no value explains them, new and removed ones, by kind."""
    reason, persistence = dag.reason(job), dag.workflow.persistence
    made = reason.updated_input_run
    updated = {str(path) for path in reason.updated_input if path not in made}
    if not updated and not reason.input_changed:
        return {}
    if (changes := find_dataset_changes(job)) is not None:
        dataset = {"changed": changes.changed, "new": changes.new, "removed": changes.removed}
        return {kind: {*paths} for kind, paths in dataset.items() if paths}
    recorded = _recorded(persistence.input, job)
    now = set(map(str, job.input))
    before = now if recorded is None else set(recorded)
    kinds = {"changed": updated & before}
    if not only_content:
        kinds |= {"new": now - before, "removed": before - now}
    return {kind: paths for kind, paths in kinds.items() if paths}


def _missing(job: Any, reason: Any) -> list[str]:
    missing = set(map(str, reason.missing_output))
    if not missing:
        return []
    if missing == set(map(str, job.output)):
        return [NEW]
    damaged = {path for path in missing if path.endswith(" (damaged)")}
    found = [f"missing: {name_files(missing - damaged)}"] if missing - damaged else []
    return found + ([f"damaged: {name_files(one[:-10] for one in damaged)}"] if damaged else [])


def _launch_changes(job: Any, dag: Any) -> list[str]:
    """List the values for which a training's launch files are rendered again."""
    if job.rule.name != TRAINING:
        return []
    launches = (one for one in dag.dependencies[job] if one.rule.name == LAUNCH)
    return next((found for one in launches if (found := _changed_values(one, dag))), [])


def _after(job: Any, dag: Any) -> list[str]:
    """Return the last of its running predecessors."""
    updated = dag.reason(job).updated_input_run
    before = {one for one, files in dag.dependencies[job].items() if files & updated}
    last = before - {earlier for one in before for earlier in _ancestors(one, dag)}
    names = sorted(map(job_name, last))
    return [f"after {join_first(names, JOBS_SHOWN)}"] if names else []


def _ancestors(job: Any, dag: Any) -> set[Any]:
    found: set[Any] = set()
    waiting = list(dag.dependencies[job])
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += dag.dependencies[one]
    return found
