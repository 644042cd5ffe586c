"""This part of the workflow looks at what a killed Snakemake left: its lock, and a training that runs.

OUTPUTS: none
"""

import sys

from zerotrain import snakemake_runs
from zerotrain.dvc import jobs as graph_jobs
from zerotrain.training.lock import refuse_held

if workflow.is_main_process and not graph_jobs.LOOKING:
    snakemake_runs.begin(sys.argv[1:])


def refuse_running():
    """A second job of such a training would wait for its machines to be refused by the lock there."""
    snakemake_runs.note_executor(local=workflow.local_exec)
    for job in workflow.dag.needrun_jobs():
        if job.rule.name == "train_phase" and workflow.is_main_process:
            refuse_held(Path(job.params.progress))
