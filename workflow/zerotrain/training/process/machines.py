"""The processes of a phase: on which machines they run, how they are started, where they meet.

The machines are those of a Slurm job, or only this one. The lock, the watch and the report of the
ending stay with the process that starts the training, on the job's first machine; on each machine a
launcher starts its share of the processes.

torchrun and `accelerate launch` set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. srun
sets SLURM_*, which neither torch nor accelerate reads.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import MutableMapping
from datetime import timedelta
from pathlib import Path

from zerotrain.errors import PipelineError
from zerotrain.launch.files import SRUN
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.machine.host import detect_host
from zerotrain.machine.ports import free_port, port_of_job, untaken_port_of_job
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


def adopt_slurm(environment: MutableMapping[str, str], phase: str = "") -> None:
    """Derive the variables that torch reads from those that srun sets, unless they are set.

    An sbatch script that calls a process without srun has no task: the process stays single.

    Args:
        environment: The environment that is read and updated.
        phase: The phase's name: one job step may have processes of several phases.
    """
    tasks = environment.get("SLURM_STEP_NUM_TASKS")
    if "RANK" in environment or tasks is None or "SLURM_PROCID" not in environment:
        return
    job, step = environment.get("SLURM_JOB_ID", "0"), environment.get("SLURM_STEP_ID", "0")
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    local = int(environment.get("SLURM_LOCALID", "0"))
    visible = [one for one in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
    if visible:  # --gpus-per-task shows each task one device, under the number 0
        local %= len(visible)
    port = port_of_job(job, step, phase)
    variables = {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": str(local),
        "MASTER_ADDR": _first_node(nodes) or "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    for key, value in variables.items():
        environment.setdefault(key, value)


def adopt_single(environment: MutableMapping[str, str]) -> None:
    """Set up a process without a launcher as the only one; DeepSpeed would look for MPI."""
    if "RANK" not in environment:
        environment.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
        environment.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))


def init_process_group(phase: ResolvedPhase) -> None:
    """Initialize the process group of a training with several processes, with the phase's timeout.

    The engine, which would do it later, finds it initialized.

    Raises:
        PipelineError: the number of processes is not that of the phase.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count != phase.launch.num_processes:
        raise PipelineError(
            f"phase {phase.phase}: launch.num_processes is {phase.launch.num_processes}, and "
            f"{count} {'were' if count > 1 else 'was'} started",
            hint=f"torchrun --nproc_per_node {phase.launch.num_processes}, srun -n "
            f"{phase.launch.num_processes}; or change launch.num_processes",
        )
    if count == 1:
        return
    timeout = timedelta(seconds=phase.launch.ddp_timeout)
    if phase.derived.engine == "deepspeed":
        from zerotrain.training.engines.zero_engine import init_distributed

        init_distributed(timeout)
    else:
        from accelerate import PartialState

        from zerotrain.machine.device import device_type

        PartialState(cpu=device_type() == "cpu", timeout=timeout)


def _first_node(nodes: str) -> str:
    """Return the first host of Slurm's list: gpu[03-07,12]-ib,big1 gives gpu03-ib."""
    match = re.match(r"([^\[,]*)(?:\[(\w+)[^\]]*\])?([^,]*)", nodes)
    return "".join(part or "" for part in match.groups()) if match else ""
