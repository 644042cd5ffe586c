"""Jobs that a raised version of a stage does not rerun, and outputs that a job replaces.

Snakemake runs every job with an input that another job makes again. A raised version remakes launch
files, a dataset or a base, mostly with the same bytes, and everything after them would be trained
again. This module takes such jobs out of the plan, unless a value, a file or a missing result
requires them. If an input ends up with other bytes, this run reports it and the next plan runs the
job.

A base that was built from a preset is kept as well when its dataset changes: with another tokenizer
or autoencoder, every sample would be encoded again and every phase trained again.

Snakemake removes a job's outputs before it runs, so a failed export would lose the former weights.
Stages replace a folder by a rename, so no removal is needed: after a failure the former result is
complete, readable, and stale, and the job is planned again. Snakemake's own flag for this,
`update()`, records a failed job as done.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from enum import IntEnum
from pathlib import Path
from typing import Any

from zerotrain import artifact
from zerotrain.errors import PipelineError
from zerotrain.pipeline.graph.versions import PARAMETER, is_version, version_change
from zerotrain.pipeline.job_files import unwatched

LONG_AGO = (1, 1)
"""Access and modification time of a stale output, in seconds: every input is newer."""


def keep_former_results() -> None:
    """Keep the former outputs of this process's jobs until they are replaced; also on a node."""
    from snakemake.jobs import Job

    Job.remove_existing_output = _remove_logs
    Job.cleanup = _keep_stale


async def _remove_logs(job: Any) -> None:
    for path in job.log:
        await path.remove(remove_non_empty_dir=False)


async def _keep_stale(job: Any, skip_outputs: Any) -> None:
    make_stale(job.rule.workflow, job)


def make_stale(workflow: Any, job: Any) -> None:
    """Mark a job's outputs as stale: older than all inputs, and without metadata.

    Args:
        workflow: Snakemake's workflow object.
        job: The job; missing outputs stay missing.
    """
    for path in job.output:
        with contextlib.suppress(FileNotFoundError):
            os.utime(path, LONG_AGO)
        workflow.persistence.cleanup_metadata(path)


TRAINING, EXPORT, CACHE = "train_phase", "export_weights", "cache_latents"
KEPT = (TRAINING, EXPORT, CACHE)
"""The rules whose jobs are kept."""
LISTED = 3
"""Number of a job's files that are named."""


class Trigger(IntEnum):
    """Why a job runs, apart from the jobs before it."""

    NOTHING = 0
    VERSION = 1
    EDIT = 2


class KeptJobs:
    """The kept jobs of one call of snakemake.

    Args:
        workflow: Snakemake's workflow object, while the Snakefile is read.
    """

    def __init__(self, workflow: Any) -> None:
        self._workflow = workflow
        self._kept: list[Any] = []
        self._bases: list[Any] = []

    async def change_plan(self) -> None:
        """Remove from the plan the jobs that only a raised version or an edited rule reruns."""
        dag = self._workflow.dag
        edited: dict[Any, bool] = {}
        for level in dag.toposorted():
            for job in level:
                if dag.needrun(job) and (found := await self._decide(job, edited)) is not None:
                    edited[job] = found
        removed = [job for job in dag._needrun if job not in edited]
        gone = {str(path) for job in removed for path in job.output}
        self._kept = [job for job in removed if job.rule.name in KEPT]
        self._bases = [job for job in removed if unwatched(job)]
        for job in removed:
            dag._needrun.discard(job)
            dag._n_until_ready.pop(job, None)
            dag.reason(job).clear()
        for job in dag._needrun:
            made = dag.reason(job).updated_input_run
            made -= {path for path in made if str(path) in gone}

    async def _decide(self, job: Any, edited: dict[Any, bool]) -> bool | None:
        """Return whether a planned job's output may change for reasons other than its version.

        Args:
            job: The job.
            edited: The results for the planned jobs before it that run.

        Returns:
            None if the job does not run.
        """
        needed = self._workflow.dag.dependencies[job]
        before = [
            edited[one]
            for one, files in needed.items()
            if one in edited and not unwatched(job).issuperset(map(str, files))
        ]
        if job.rule.norun:
            return any(before) if before or await self._trigger(job) else None
        trigger = await self._trigger(job)
        if trigger == Trigger.EDIT or any(before):
            return True
        if unwatched(job) and (is_built_for_another(job) or any(map(edited.get, needed))):
            return None  # built again by its new code, it would be of the new dataset
        if job.rule.name == CACHE:
            return False if version_change(self._workflow.persistence, job) else None
        if job.rule.name in KEPT or not (trigger or before):
            return None
        return False

    async def _trigger(self, job: Any) -> Trigger:
        """Find the trigger of a job among Snakemake's, except for the jobs before it."""
        dag, persistence = self._workflow.dag, self._workflow.persistence
        reason = dag.reason(job)
        forced = not dag.forcefiles.isdisjoint(job.output) or job.rule in dag.forcerules
        others = reason.noio or reason.nooutput or reason.unfinished_queue_input
        if reason.forced or (forced and job not in dag.omitforce) or others:
            return Trigger.EDIT
        if reason.missing_output or not all([await path.exists() for path in job.output]):
            return Trigger.EDIT
        if job.rule.norun:
            return Trigger.NOTHING
        updated = await self._updated(job)
        if updated and not is_trained(job):
            return Trigger.EDIT
        triggers = {str(one) for one in self._workflow.rerun_triggers}
        values = self._compare_values(job) if "params" in triggers else Trigger.NOTHING
        inputs = "input" in triggers and any(persistence.input_changed(job))
        if values == Trigger.EDIT or inputs:
            return Trigger.EDIT
        code = "code" in triggers and any(persistence.code_changed(job))
        stack = "software-env" in triggers and any(persistence.software_stack_changed(job))
        return Trigger.VERSION if updated or code or stack else values

    async def _updated(self, job: Any) -> list[Any]:
        """List the inputs that are newer than the outputs and differ in content from the record."""
        dag, persistence = self._workflow.dag, self._workflow.persistence
        oldest = await job.output_mintime
        if oldest is None:
            return []
        found = []
        # What a failed job left is older than all inputs.
        ignored = set() if oldest == LONG_AGO[1] else unwatched(job)
        for path in (path for path in job.input if str(path) not in ignored):
            if not await path.exists() or not await path.is_newer(oldest):
                continue
            known = persistence.input_checksums(job, path)
            limit = dag.max_checksum_file_size
            recorded = next(iter(known)) if len(known) == 1 else None
            same = (
                recorded is not None
                and await path.is_checksum_eligible(limit)
                and await path.is_same_checksum(recorded, limit)
            )
            if not same:
                found.append(path)
        return found

    def _compare_values(self, job: Any) -> Trigger:
        """Compare a job's values with the recorded ones."""
        persistence = self._workflow.persistence
        known = persistence._params(job)
        values = {name: value for name, value in job.params.items() if repr(value) in known}
        values.pop(PARAMETER, None)
        for every in filter(None, map(persistence.params, job.output)):
            if {value for value in every if not is_version(value)} != {*map(repr, values.values())}:
                return Trigger.EDIT
        return Trigger.VERSION if version_change(persistence, job) else Trigger.NOTHING

    def report(self) -> None:
        """Report, after the last job, the kept jobs whose inputs have changed."""
        for job, files in self.outdated().items():
            print(describe(job, files), file=sys.stderr)
        dag = self._workflow.dag
        for job in self._bases:
            if any(map(dag.finished, dag.dependencies[job])) and is_built_for_another(job):
                print(describe_base(job), file=sys.stderr)

    def outdated(self) -> dict[Any, list[Any]]:
        """Find the kept jobs whose inputs other jobs of this call made with other content."""
        if self._workflow.dryrun or not self._kept:
            return {}
        self._workflow.iocache.deactivate()
        return asyncio.run(self._find_outdated())

    async def _find_outdated(self) -> dict[Any, list[Any]]:
        found = {job: await self._updated(job) for job in self._kept if not is_trained(job)}
        return {job: changed for job, changed in found.items() if changed}


def is_trained(job: Any) -> bool:
    """Return whether a job trains, and its published checkpoint is current for its inputs."""
    if job.rule.name != TRAINING:
        return False
    from zerotrain.training.checkpointing import published

    launch, base, cache = (Path(job.input[name]).parent for name in ("launch", "base", "cache"))
    state = [path for path in job.input if str(path).endswith("/state/manifest.json")]
    start = Path(state[0]).parent if state else None
    output = Path(job.output["manifest"]).parent
    progress = Path(job.params["progress"])
    return published.is_current(launch, base, cache, start, progress, output)


def is_built_for_another(job: Any) -> bool:
    """Return whether a base was built for another dataset than the one that is prepared now."""
    try:
        base = artifact.read_manifest(Path(job.output.manifest).parent, "base")
        dataset = artifact.read_manifest(Path(job.input.dataset).parent, "dataset")
    except PipelineError:
        return False
    return base.parents.get("dataset", {}).get("identity") not in (None, dataset.identity)


def describe_base(job: Any) -> str:
    """Describe a base that is kept though its dataset is another one now."""
    return (
        f"{job.rule.name} {Path(job.output.manifest).parent}: kept as it is, built for the dataset "
        f"before the edit; `snakemake --forcerun {job.rule.name}` builds it again, and then all is "
        "encoded and trained again"
    )


def describe(job: Any, files: list[Any]) -> str:
    """Describe a kept job whose inputs have changed."""
    names = ", ".join(sorted(map(str, files))[:LISTED])
    return (
        f"{job.rule.name} {job.output[0]}: kept, but this version made {names} with other content "
        "than the one before; the next `snakemake` runs it"
    )
