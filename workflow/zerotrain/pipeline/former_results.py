"""A job's former outputs stay until the job has made new ones.

Snakemake removes a job's outputs before it runs, so a failed export would lose the former weights.
Stages replace a folder by a rename, so no removal is needed: after a failure the former result is
complete, readable, and stale, and the job is planned again. Snakemake's own flag for this,
`update()`, records a failed job as done.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

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
