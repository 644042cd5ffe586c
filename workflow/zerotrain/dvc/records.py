"""Snakemake's records of outputs that came without it, written from what dvc.lock says of them.

An output is told from another of the same name by its time, which Snakemake notes with its record.
Where it is another, the content decides: what dvc.lock has entered as made from just these inputs
and values is fresh, whoever put it there; all else is stale.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from zerotrain.dvc.book import read_book, write_book
from zerotrain.dvc.entry import enter
from zerotrain.dvc.jobs import in_order, stage_name, workflow_of
from zerotrain.dvc.meanwhile import changed_at
from zerotrain.dvc.pipeline import LOCK
from zerotrain.dvc.storage import open_repo

LONG_AGO = (1, 1)
"""Access and modification time of a stale output: every input is newer."""


def settle(config: Path, *, killed: bool) -> None:
    """Let Snakemake's records say of each output what is true of it.

    Args:
        config: The run's configuration.
        killed: A run ended before it entered in dvc.lock what it had made: enter it now.
    """
    looked = read_book().get("looked", 0.0)
    began = time.time()
    with workflow_of(config) as workflow:
        found = in_order(workflow.dag.jobs)
        known, changed = _dvc_says()
        fresh = []
        for job in found:
            name = stage_name(job)
            if not all(Path(path).exists() for path in job.output):
                continue
            if _is_as_recorded(workflow, job):
                if _has_other_content(workflow, job, looked):
                    make_stale(workflow, job)
                elif name in changed and not workflow.dag.needrun(job):
                    fresh.append(name)
            elif name in known:
                if name in changed:
                    make_stale(workflow, job)
                else:
                    _make_fresh(workflow, job)
        if killed:
            enter(fresh)
        seen = {str(path): os.stat(path).st_mtime for job in found for path in job.output
                if Path(path).exists()}  # fmt: skip
    write_book(looked=began, seen=seen, running=None)


def _dvc_says() -> tuple[set[str], set[str]]:
    """Names of the stages that dvc.lock knows, and of those that have changed since."""
    import yaml

    if not LOCK.is_file():
        return set(), set()
    locked = yaml.load(LOCK.read_text(), Loader=yaml.CSafeLoader) or {}
    with open_repo() as repo:
        return set(locked.get("stages") or {}), set(repo.status())


def _is_as_recorded(workflow: Any, job: Any) -> bool:
    """Whether the outputs are those that Snakemake saw when the job ended."""
    return all(
        (record := workflow.persistence.metadata(path)) is not None
        and record.endtime == os.stat(path).st_mtime
        for path in job.output
    )


def _has_other_content(workflow: Any, job: Any, looked: float) -> bool:
    """Whether an input was replaced by another content under an older time."""
    limit = workflow.dag_settings.max_checksum_file_size
    for path in job.input:
        if changed_at(path) <= looked:
            continue
        said = workflow.persistence.input_checksums(job, path)
        if len(said) == 1 and None not in said:
            same = path.is_same_checksum(next(iter(said)), limit)
            if not workflow.async_run(same):
                return True
    return False


def _make_fresh(workflow: Any, job: Any) -> None:
    """Record the job as done now: newer than its inputs, with their checksums."""
    for path in job.output:
        os.utime(path)
    workflow.iocache.deactivate()
    workflow.async_run(workflow.persistence.finished(job))


def make_stale(workflow: Any, job: Any) -> None:
    """Let a job's outputs be older than all inputs, and of nobody knows what."""
    for path in job.output:
        workflow.persistence.cleanup_metadata(path)
        os.utime(path, LONG_AGO)
