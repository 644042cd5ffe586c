"""Actions around the graph in one call of snakemake: before the plan, before the first job, and
after the last."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from zerotrain.artifact.layout import RESULTS
from zerotrain.artifact.links import check_run_links
from zerotrain.machine.disk_errors import check_writable
from zerotrain.pipeline import snakemake_runs
from zerotrain.pipeline.dvc import jobs as graph_jobs
from zerotrain.pipeline.dvc.agreement import Agreement
from zerotrain.pipeline.graph.runs import Runs, checked
from zerotrain.pipeline.kept_jobs import KeptJobs, keep_former_results
from zerotrain.pipeline.rebuild import add_damaged_folders, set_aside_damaged
from zerotrain.pipeline.trained_earlier import describe_trained_earlier, find_trained_earlier
from zerotrain.training.process.lock import check_not_locked

SNAKEMAKE_FOLDER = snakemake_runs.LOCKS.parent


class Hooks:
    """The hooks of one call, created when all rules are read.

    Args:
        workflow: Snakemake's workflow object.
        runs: The runs that are planned.
        config: The configuration file.
    """

    def __init__(self, workflow: Any, runs: Runs, config: Path) -> None:
        self._workflow, self._runs = workflow, runs
        self._main = workflow.is_main_process
        if self._main:  # Snakemake, which writes there also in a dry run, ends in a traceback
            checked(check_writable)(SNAKEMAKE_FOLDER)
        if self._main and not graph_jobs.LOOKING:
            snakemake_runs.begin(sys.argv[1:])
        keep_former_results()
        self._kept = KeptJobs(workflow)
        build_dag = workflow._build_dag

        def build_dag_and_change_it() -> None:
            build_dag()
            if not workflow.touch:  # by --touch the user declares all outputs current
                workflow.async_run(self._change_plan())

        if self._main:
            workflow._build_dag = build_dag_and_change_it
        if self._main and not graph_jobs.LOOKING and "DVC_STAGE" not in os.environ:
            _report_trained_earlier(runs)
        self._agreement = Agreement(workflow, config, self._kept)

    async def _change_plan(self) -> None:
        """Take kept jobs out of Snakemake's plan, add those of damaged folders, and recount."""
        dag = self._workflow.dag
        await self._kept.change_plan()
        await add_damaged_folders(dag)
        for job in dag._needrun:
            dag._n_until_ready[job] = sum(1 for one in dag.dependencies[job] if dag.needrun(one))
        dag._len = len(dag._finished | dag._needrun)

    @checked
    def before_jobs(self) -> None:
        """Check that results can be written, through no link and while no planned training runs,
        and set aside what jobs will replace."""
        if self._main:
            check_run_links(*self._runs.by_name)
            for data in self._runs.by_data:
                check_run_links(data=data)
        check_writable(RESULTS)
        snakemake_runs.note_executor(local=self._workflow.local_exec)
        for job in self._workflow.dag.needrun_jobs():
            # A second job of such a training would queue for its machines, only to fail at the
            # lock.
            if job.rule.name == "train_phase" and self._main:
                check_not_locked(Path(job.params.progress))
        set_aside_damaged(self._workflow)
        self._agreement.begin()

    @checked
    def after_jobs(self) -> None:
        """Report kept jobs whose inputs changed in this call, and update DVC's records."""
        self._kept.report()
        self._agreement.end()


@checked
def _report_trained_earlier(runs: Runs) -> None:
    """Report once per plan, not in each DVC stage."""
    found = find_trained_earlier(runs.by_name.values())
    if line := describe_trained_earlier(found):
        print(line, file=sys.stderr)
