"""The machines that a phase trains on: those of its Slurm job, or only this one.

The lock, the watch and the report of the ending stay with the process that starts the training, on
the job's first machine; on each machine a launcher starts its share of the processes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from zerotrain.errors import PipelineError
from zerotrain.launch.files import SRUN
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.machine.host import detect_host
from zerotrain.machine.ports import untaken_port_of_job
from zerotrain.machine.slurm_job import Job, address_of_first, this_job
from zerotrain.training.process.machine_check import configured_port, main_process_port

LAUNCHER = "zerotrain.training.process.launcher"


def job_of(phase: ResolvedPhase) -> tuple[Job | None, list[str]]:
    """Return the job on whose machines the phase trains, if it needs several.

    Returns:
        The job, or None if all processes run on this machine, and then the message for the user.

    Raises:
        PipelineError: this is a Slurm job, and Slurm does not respond.
    """
    if phase.launch.machines == 1:
        return None, []
    job = this_job()
    if job is None and (own := os.environ.get("SLURM_JOB_ID")):
        raise PipelineError(
            f"{phase.phase}: machines {phase.launch.machines}, but Slurm does not say which "
            f"those of job {own} are (`scontrol show job {own}`)",
            hint="start again when it answers; `unset SLURM_JOB_ID` trains on this machine alone",
        )
    if job and job.nodes >= phase.launch.machines:
        return job, []
    why = f"job {job.id} has {job.nodes}" if job else "this is no job of Slurm"
    return None, [
        f"{phase.phase}: machines {phase.launch.machines}, but {why}: all "
        f"{phase.launch.num_processes} processes run on this machine"
    ]


def thread_count(phase: ResolvedPhase, processes: int) -> int:
    """Return the CPU threads of each process: the phase's setting, else its share of the cores.

    Args:
        phase: The phase.
        processes: Number of its processes on this machine.
    """
    if phase.launch.num_cpu_threads_per_process is not None:
        return phase.launch.num_cpu_threads_per_process
    host = detect_host()
    return max(1, int(host.quota or host.cores) // processes)


def launcher(phase: ResolvedPhase, launch: Path, progress: Path, job: Job | None) -> list[str]:
    """Return the command that starts the processes, without the training script's own arguments.

    Args:
        phase: The phase.
        launch: Folder of its launch files.
        progress: Folder of its progress.
        job: The job on whose machines it trains; None: this machine.

    Raises:
        PipelineError: the configured port is taken.
    """
    own = [sys.executable, "-m", LAUNCHER, str(progress)]
    own += ["--config_file", str(launch / "accelerate.yaml")]
    if job:
        first = address_of_first(job)
        named = configured_port(launch)
        port = named or untaken_port_of_job(first, job.id, f"{phase.run}/{phase.phase}")
        meeting = ["--main_process_ip", first, "--main_process_port", str(port)]
        return ["sh", str(launch / SRUN), *own, *meeting]
    alone = ["--num_machines", "1"] if phase.launch.machines > 1 else []
    return [*own, *alone, "--main_process_port", str(main_process_port(phase, launch))]
