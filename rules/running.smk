"""This part of the workflow refuses to submit what a killed Snakemake left running on a cluster.

OUTPUTS: none
"""

from zerotrain.training.lock import refuse_held


def refuse_running():
    """A second job of such a training would wait for its machines to be refused by the lock there."""
    for job in workflow.dag.needrun_jobs():
        if job.rule.name == "train_phase" and workflow.is_main_process:
            refuse_held(Path(job.params.progress))
