"""What is done around the graph in one call of snakemake: before its first job, and after
its last."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zerotrain.artifact.layout import RESULTS
from zerotrain.artifact.links import check_run_links
from zerotrain.graph.artifacts import Artifacts
from zerotrain.graph.currency import KEPT, Currency, mark_for_rebuild
from zerotrain.graph.dvc.record import record
from zerotrain.graph.runs import Runs, checked
from zerotrain.machine.disk_errors import check_writable
from zerotrain.training.process.lock import check_not_locked


@checked
def before_jobs(workflow: Any, runs: Runs, artifacts: Artifacts) -> None:
    """Check that results can be written, through no link and while no planned training runs.

    Jobs that the user forces make their folders again, though these are current.

    Args:
        workflow: Snakemake's workflow object.
        runs: The runs that are planned.
        artifacts: Their artifacts.
    """
    check_run_links(*runs.by_name)
    for data in runs.by_data:
        check_run_links(data=data)
    check_writable(RESULTS)
    dag = workflow.dag
    for job in dag.needrun_jobs():
        # A second job of such a training would queue for its machines, only to fail at the lock.
        if job.rule.name == "train_phase":
            check_not_locked(Path(job.params.progress))
        planned = artifacts.of_output.get(str(next(iter(job.output), "")))
        if planned is not None and dag.reason(job).forced:
            mark_for_rebuild(planned)


@checked
def after_jobs(workflow: Any, config: Path, began: float) -> None:
    """Record with DVC what is up to date now.

    Args:
        workflow: Snakemake's workflow object.
        config: The configuration file.
        began: The time in seconds before it was read.
    """
    dag = workflow.dag
    allowed = dag.rules_allowed_for_needrun  # others count as not needed, whatever they are
    made = [job for job in dag.jobs if dag.finished(job) or not (allowed or dag.needrun(job))]
    record(config, {str(path) for job in made for path in job.output}, began)


def report_versions(found: Sequence[Currency]) -> None:
    """Report the phases that another version of a stage made, whose results stay."""
    for stage in KEPT:
        others = [one for one in found if one.planned.stage == stage and one.version]
        if others:
            version = others[0].version
            assert version
            count = f"{len(others)} phase was" if len(others) == 1 else f"{len(others)} phases were"
            stay = "stays as it is" if len(others) == 1 else "stay as they are"
            print(
                f"{count} made by another version of {stage} than {version.new} and {stay}",
                file=sys.stderr,
            )
