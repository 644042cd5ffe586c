"""Rendezvous of a training's processes: the identity of this process and its timeout.

torchrun and `accelerate launch` set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. srun
sets SLURM_*, which neither torch nor accelerate reads.
"""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping
from datetime import timedelta

from zerotrain.errors import PipelineError
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.machine.ports import port_of_job


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
    from zerotrain.machine.ports import free_port

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
