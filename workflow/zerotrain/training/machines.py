"""The machines that a phase trains on: those of its Slurm job, or this one alone.

The lock, the watch and the answer stay with the process that starts the training, on the job's
first machine; on each of them a launcher starts the machine's share of the processes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from zerotrain.cluster.job import Job, address_of_first, this_job
from zerotrain.errors import PipelineError
from zerotrain.launch.files import SRUN
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.machine.ports import port_of_job
from zerotrain.training.machine_check import main_process_port, named_port

LAUNCHER = "zerotrain.training.launcher"


def job_of(phase: ResolvedPhase) -> tuple[Job | None, list[str]]:
    """The job on whose machines the phase is trained, if it asks for several.

    Returns:
        The job, or None where all processes run on this machine; and what a user is told then.

    Raises:
        PipelineError: Slurm does not answer within a job of it.
    """
    if phase.machines == 1:
        return None, []
    job = this_job()
    if job is None and (own := os.environ.get("SLURM_JOB_ID")):
        raise PipelineError(
            f"{phase.phase}: machines {phase.machines}, but Slurm does not say which those of job "
            f"{own} are (`scontrol show job {own}`)",
            hint="start again when it answers; `unset SLURM_JOB_ID` trains on this machine alone",
        )
    if job and job.nodes >= phase.machines:
        return job, []
    why = f"job {job.id} has {job.nodes}" if job else "this is no job of Slurm"
    return None, [
        f"{phase.phase}: machines {phase.machines}, but {why}: all {phase.num_processes} processes "
        "run on this machine"
    ]


def launcher(phase: ResolvedPhase, launch: Path, progress: Path, job: Job | None) -> list[str]:
    """The command that starts the processes, up to what they are.

    Args:
        phase: The phase.
        launch: Folder of its launch files.
        progress: Folder of its progress.
        job: The job on whose machines it trains; None: this one.

    Raises:
        PipelineError: the port that is named is taken.
    """
    own = [sys.executable, "-m", LAUNCHER, str(progress)]
    own += ["--config_file", str(launch / "accelerate.yaml")]
    if job:
        port = named_port(launch) or port_of_job(int(job.id))
        meeting = ["--main_process_ip", address_of_first(job), "--main_process_port", str(port)]
        return ["sh", str(launch / SRUN), *own, *meeting]
    alone = ["--num_machines", "1"] if phase.machines > 1 else []
    return [*own, *alone, "--main_process_port", str(main_process_port(phase, launch))]
