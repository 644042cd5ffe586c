"""Sync between Snakemake's metadata and dvc.lock.

Snakemake (.snakemake/) identifies an output by its time; DVC (dvc.lock) by its content. So:

- After `snakemake` has run, the stages that are up to date are committed to dvc.lock, and dvc.yaml
  is written again if the graph has changed.
- Before it plans, `zerotrain.pipeline.dvc.records` looks for changes that Snakemake cannot notice:
  outputs that DVC restored, inputs with new content and an old time, a run that was killed before
  it could commit its results.

Within a DVC stage neither happens: DVC decides what is stale, and its stages force their jobs. They
fail rather than let DVC record a wrong result: if dvc.yaml does not match the graph, or if
something was edited while the stage ran.

Without DVC, or if dvc.yaml belongs to another run, Snakemake works alone.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from zerotrain.config.suggestions import join_first
from zerotrain.errors import PipelineError
from zerotrain.pipeline.dvc import jobs
from zerotrain.pipeline.dvc.changes import (
    ConcurrentEdits,
    edited_during,
    is_alive,
    note_running,
    read_journal,
    update_journal,
)
from zerotrain.pipeline.dvc.files import LOCK, PIPELINE
from zerotrain.pipeline.dvc.jobs import config_of, in_order, stage_name, words_of
from zerotrain.pipeline.dvc.pipeline import (
    GUARD,
    is_current,
    is_ours,
    load_pipeline,
    outdated,
)
from zerotrain.pipeline.dvc.records import has_unseen_changes
from zerotrain.pipeline.kept_jobs import KeptJobs, make_stale

LOCK_BEHIND = f"{LOCK} was not brought up to date"


class Agreement:
    """The sync during one call of snakemake, created when the Snakefile is read.

    Args:
        workflow: Snakemake's workflow object.
        config: The run's configuration.
        kept: The jobs that a raised version does not rerun.
    """

    def __init__(self, workflow: Any, config: Path, kept: KeptJobs) -> None:
        self._kept = kept
        self._workflow = workflow
        self._config = config
        self._in_stage = "DVC_STAGE" in os.environ
        outputs = {} if jobs.LOOKING or not workflow.is_main_process else outputs_of(config)
        running = read_journal().get("running")
        alone = self._in_stage or not (
            running and is_alive(running)
        )  # otherwise that run syncs its own results
        self._in_use = bool(outputs) and alone
        if not self._in_use:
            return
        self._edits = ConcurrentEdits(config)
        if not self._in_stage:
            wanted = running or has_unseen_changes(outputs)
            if wanted and not reconcile(config, killed=bool(running)):
                return  # the next call tries again
            self._edits.began = time.time()  # the reconciliation is not an edit
            atexit.register(self._enter_or_warn)

    def begin(self) -> None:
        """Record that a run starts, before its first job.

        Raises:
            PipelineError: DVC calls it, and dvc.yaml is outdated, so DVC would miss edits.
        """
        if self._in_use and not self._in_stage:
            note_running(self._edits.given)
        elif self._in_use and not self._is_current():
            raise outdated(self._config)

    def end(self) -> None:
        """Check, after the last job, that nothing was edited during the run.

        Raises:
            PipelineError: DVC calls it, and would record inputs that the output was not made from.
        """
        if not (self._in_use and self._in_stage):
            return
        if edits := self._set_aside_edited(self._workflow.dag.finished):
            names = join_first(sorted({name for found in edits.values() for name in found}), 3)
            raise PipelineError(
                f"{names}: edited while {', '.join(edits)} ran: what it made is of neither",
                hint="call DVC again; while it works, edit another clone",
            )

    def _is_current(self) -> bool:
        return is_current(pipeline_here(), self._workflow.dag.jobs, self._config)

    def _set_aside_edited(self, ended: Callable[[Any], bool]) -> dict[str, list[str]]:
        """Mark outputs stale whose inputs were edited during the job; return edits by stage."""
        self._workflow.persistence._clear_cache()  # it caches what it read before the jobs ran
        stages = pipeline_here()["stages"]
        found, stale = {}, []
        for job in in_order(self._workflow.dag.jobs):
            name = stage_name(job)
            if name not in stages or not ended(job):
                continue
            if edits := self._edits.edited(self._workflow, job, stages[name]):
                found[name] = list(edits)
                if self._workflow.dag.finished(job) and edited_during(
                    self._workflow, job, edits.values()
                ):
                    stale.append(job)
        for job in stale:
            make_stale(self._workflow, job)
        return found

    def _enter_or_warn(self) -> None:
        try:
            self._enter()
        except PipelineError as error:  # the configuration is no longer valid
            warn(LOCK_BEHIND, str(error))

    def _enter(self) -> None:
        """Update dvc.lock at the end of the process, even if no job ran or one failed."""
        workflow = self._workflow
        if workflow._executor_plugin is None or workflow.dryrun or workflow._dag is None:
            return
        dag = workflow.dag
        if workflow.touch or not workflow.execution_settings.keep_metadata:
            return  # the metadata does not record the inputs of the outputs
        if dag.rules_allowed_for_needrun or len(workflow.rerun_triggers) < 5:
            return  # Snakemake has not checked everything
        if not self._is_current():
            print(f"{PIPELINE}: written again, because the graph has changed", file=sys.stderr)
            if _in_a_process("generate", str(self._config)):
                return
            pipeline_here.cache_clear()
        outputs = outputs_of(self._config)

        changed = self._kept.outdated()

        def is_fresh(job: Any) -> bool:
            return dag.finished(job) or not (dag.needrun(job) or job in changed)

        edits = self._set_aside_edited(is_fresh)
        # Outputs of a rerun job, such as one with a damaged folder, are not edits; if they differ,
        # the next plan and `dvc status` find it.
        remade = {path for job in dag.jobs if dag.finished(job) for path in map(str, job.output)}
        for name, found in edits.items():
            if remade.issuperset(found):
                continue
            names = join_first(found, 3)
            print(f"{name}: not entered in {LOCK}: {names}: edited meanwhile", file=sys.stderr)
        fresh = [stage_name(job) for job in in_order(dag.jobs) if is_fresh(job)]
        fresh = [name for name in fresh if name in outputs and name not in edits]
        if not self._edits.config_edited():
            fresh.append(GUARD)
        stamp = _stamp(self._config, fresh)
        if stamp != read_journal().get("entered"):
            stamp = _stamp(self._config, fresh) if commit_stages(fresh) else ""
        looked = read_journal().get("looked", 0.0) if edits else time.time()
        update_journal(running=None, looked=looked, entered=stamp)


def outputs_of(config: Path) -> dict[str, list[str]]:
    """List the outputs of each stage; empty if DVC is unused or dvc.yaml is another run's."""
    set_up = PIPELINE.is_file() and Path(".dvc").is_dir()
    under_git = any((folder / ".git").exists() for folder in (Path.cwd(), *Path.cwd().parents))
    if not (set_up and under_git and importlib.util.find_spec("dvc")):
        return {}
    found = {}
    for name, stage in (pipeline_here().get("stages") or {}).items():
        if is_ours(stage) and name != GUARD:
            words = words_of(stage["cmd"])
            if config_of(stage["cmd"]) == config and "--" in words:
                found[name] = words[words.index("--") + 1 :]
    return found


@cache
def pipeline_here() -> dict[str, Any]:
    """Read dvc.yaml; warn and return an empty mapping if it is invalid."""
    try:
        return load_pipeline()
    except PipelineError as error:
        warn("DVC is left aside", str(error))
        return {}


def reconcile(config: Path, *, killed: bool) -> bool:
    """Reconcile Snakemake's metadata with dvc.lock, in a separate process that reads the graph.

    Returns:
        Whether it succeeded.
    """
    words = ["settle", str(config), *(["--killed"] if killed else [])]
    if code := _in_a_process(*words):
        warn(
            f"Snakemake's records and {LOCK} could not be made to agree",
            "above it says why; what snakemake plans now rests on its own records alone",
        )
    return not code


def commit_stages(names: list[str]) -> bool:
    """Commit stages to dvc.lock, in a separate process, as it may fail or take long.

    Returns:
        Whether all were committed.
    """
    code = _in_a_process("enter", *names) if names else 0
    if code:
        warn(LOCK_BEHIND, "above it says why; fix that and call `snakemake` again")
    return not code


def warn(what: str, why: str) -> None:
    """Print a warning; the run continues."""
    print(f"WARNING: {what}: {why}", file=sys.stderr)


def _in_a_process(*words: str) -> int:
    command = [sys.executable, "-m", "zerotrain", "dvc", *words]
    return subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr).returncode


def _stamp(config: Path, names: Iterable[str]) -> str:
    """Hash the times and sizes of everything that the stages in dvc.lock depend on."""
    from zerotrain.artifact import digest

    stages = pipeline_here()["stages"]
    outputs = outputs_of(config)
    paths = {str(config), str(PIPELINE), str(LOCK)}
    for name in names:
        paths.update(outputs.get(name, ()))
        for dep in stages[name].get("deps", ()):
            paths.add(dep)
            paths.update(map(str, Path(dep).rglob("*")) if Path(dep).is_dir() else ())
    found = []
    for path in sorted(paths):
        with contextlib.suppress(OSError):
            stat = os.stat(path)
            found.append([path, stat.st_mtime_ns, stat.st_size])
    return digest(found)
