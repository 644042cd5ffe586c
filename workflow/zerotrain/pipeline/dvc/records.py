"""Snakemake's metadata for outputs that it has not made, written from dvc.lock's records.

Snakemake identifies an output by its time, which its record contains. If the time differs, the
content decides: an output that dvc.lock records as made from these inputs and values is up to date,
whatever program wrote it; all others are stale.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from zerotrain.artifact.documents import read_text
from zerotrain.pipeline.dvc.changes import (
    changed_at,
    digest_of,
    edited_during,
    lock_stamp,
    read_journal,
    update_journal,
)
from zerotrain.pipeline.dvc.files import LOCK, parse_lock
from zerotrain.pipeline.dvc.jobs import in_order, stage_name, workflow_of
from zerotrain.pipeline.dvc.pipeline import current_stages, load_pipeline
from zerotrain.pipeline.dvc.storage import commit_stages, open_repo
from zerotrain.pipeline.job_files import unwatched
from zerotrain.pipeline.kept_jobs import make_stale


def has_unseen_changes(outputs: Mapping[str, Iterable[str]]) -> bool:
    """Return whether outputs or inputs were changed in a way that Snakemake would not notice."""
    from snakemake.persistence.file import FilePersistence

    persistence = FilePersistence(nolock=True)
    journal = read_journal()
    looked, seen = journal.get("looked", 0.0), journal.get("seen", {})
    same_lock = journal.get("lock") == lock_stamp()
    times: dict[str, os.stat_result | None] = {}

    def stat(path: str) -> os.stat_result | None:
        if path not in times:
            times[path] = None
            with contextlib.suppress(OSError, ValueError):
                times[path] = os.stat(path)
        return times[path]

    for output in (path for paths in outputs.values() for path in paths):
        here = stat(output)
        if here is None:
            continue
        record = persistence._read_record(output)
        if record is None or record.endtime != here.st_mtime:
            if seen.get(output) != here.st_mtime or not same_lock:
                return True
            continue
        for path in record.input or ():
            taken = stat(path)
            if taken and taken.st_mtime <= here.st_mtime and taken.st_ctime > looked:
                return True
    return False


def write_snakemake_metadata(config: Path, *, killed: bool) -> None:
    """Correct Snakemake's metadata of each output.

    Args:
        config: The run's configuration.
        killed: Whether a run ended before its results were committed to dvc.lock; commit them now.
    """
    journal = read_journal()
    looked, began, lock = journal.get("looked", 0.0), time.time(), lock_stamp()
    with workflow_of(config) as workflow:
        found = in_order(workflow.dag.jobs)
        known, changed = _dvc_says(found, config)
        fresh = []
        for job in found:
            name = stage_name(job)
            if not all(Path(path).exists() for path in job.output):
                continue
            if _is_as_recorded(workflow, job):
                if _has_other_content(workflow, job, looked) or (
                    killed and edited_during(workflow, job)
                ):
                    make_stale(workflow, job)
                elif name in changed and not workflow.dag.needrun(job):
                    fresh.append(name)
            elif name in known:
                if name in changed:
                    make_stale(workflow, job)
                else:
                    _make_fresh(workflow, job)
        # If values were edited in between, Snakemake has to check them first.
        if killed and fresh and journal.get("running", {}).get("given") == digest_of(config):
            commit_stages(fresh)
        seen = {str(path): os.stat(path).st_mtime for job in found for path in job.output
                if Path(path).exists()}  # fmt: skip
    update_journal(looked=began, seen=seen, lock=lock, running=None)


def _dvc_says(jobs: list[Any], config: Path) -> tuple[set[str], set[str]]:
    """Return the stages that dvc.lock has in their current form, and those that have changed."""
    if not LOCK.is_file():
        return set(), set()
    locked = parse_lock(read_text(LOCK, follow_links=True))
    known = locked.keys() & current_stages(load_pipeline(), jobs, config)
    with open_repo() as repo:
        return known, set(repo.status())


def _is_as_recorded(workflow: Any, job: Any) -> bool:
    """Return whether the outputs are those that Snakemake recorded when the job ended."""
    return all(
        (record := workflow.persistence.metadata(path)) is not None
        and record.endtime == os.stat(path).st_mtime
        for path in job.output
    )


def _has_other_content(workflow: Any, job: Any, looked: float) -> bool:
    """Return whether an input has new content but an older time."""
    limit = workflow.dag_settings.max_checksum_file_size
    for path in job.input:
        if str(path) in unwatched(job) or path.is_ancient or changed_at(path) <= looked:
            continue
        checksums = workflow.persistence.input_checksums(job, path)
        if len(checksums) == 1 and None not in checksums:
            same = path.is_same_checksum(next(iter(checksums)), limit)
            if not workflow.async_run(same):
                return True
    return False


def _make_fresh(workflow: Any, job: Any) -> None:
    """Record the job as done now: newer than its inputs, with their checksums."""
    for path in job.output:
        os.utime(path)
    workflow.iocache.deactivate()
    workflow.async_run(workflow.persistence.finished(job))
