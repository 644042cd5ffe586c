"""Snakemake's records of outputs that came without it, written from what dvc.lock says of them.

An output is told from another of the same name by its time, which Snakemake notes with its record.
Where it is another, the content decides: what dvc.lock has entered as made from just these inputs
and values is fresh, whoever put it there; all else is stale.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from zerotrain.dvc.book import lock_stamp, read_book, write_book
from zerotrain.dvc.entry import enter
from zerotrain.dvc.jobs import in_order, stage_name, workflow_of
from zerotrain.dvc.meanwhile import changed_at, digest_of, edited_during
from zerotrain.dvc.pipeline import LOCK, current_stages, load_pipeline
from zerotrain.dvc.storage import open_repo

LONG_AGO = (1, 1)
"""Access and modification time of a stale output: every input is newer."""


def disturbed(outputs: Mapping[str, Iterable[str]]) -> bool:
    """Whether outputs or inputs were changed in a way that Snakemake would not notice."""
    from snakemake.persistence.file import FilePersistence

    persistence = FilePersistence(nolock=True)
    book = read_book()
    looked, seen = book.get("looked", 0.0), book.get("seen", {})
    same_lock = book.get("lock") == lock_stamp()
    times: dict[str, os.stat_result | None] = {}

    def stat(path: str) -> os.stat_result | None:
        if path not in times:
            times[path] = None
            with contextlib.suppress(OSError):
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


def settle(config: Path, *, killed: bool) -> None:
    """Let Snakemake's records say of each output what is true of it.

    Args:
        config: The run's configuration.
        killed: A run ended before it entered in dvc.lock what it had made: enter it now.
    """
    book = read_book()
    looked, began, lock = book.get("looked", 0.0), time.time(), lock_stamp()
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
        # Where values were edited meanwhile, Snakemake's own look at them decides first.
        if killed and fresh and book.get("running", {}).get("given") == digest_of(config):
            enter(fresh)
        seen = {str(path): os.stat(path).st_mtime for job in found for path in job.output
                if Path(path).exists()}  # fmt: skip
    write_book(looked=began, seen=seen, lock=lock, running=None)


def _dvc_says(jobs: list[Any], config: Path) -> tuple[set[str], set[str]]:
    """Names of the stages that dvc.lock knows as they are now, and of those that have changed."""
    import yaml

    if not LOCK.is_file():
        return set(), set()
    locked = yaml.load(LOCK.read_text(), Loader=yaml.CSafeLoader) or {}
    known = set(locked.get("stages") or {}) & current_stages(load_pipeline(), jobs, config)
    with open_repo() as repo:
        return known, set(repo.status())


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
        os.utime(path, LONG_AGO)
        workflow.persistence.cleanup_metadata(path)
