"""The processes of one training meet: who this one is, and how long it waits for the others.

torchrun and `accelerate launch` say it in RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
MASTER_PORT. srun says it in SLURM_*, which neither torch nor accelerate reads.
"""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping
from datetime import timedelta

from zerotrain.errors import PipelineError
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.machine.ports import port_of_job


def adopt_slurm(environment: MutableMapping[str, str]) -> None:
    """Derive what torch reads from what srun sets, where nobody has said it.

    A script of sbatch that calls a process without srun has no task of its own: it stays single.
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
    port = port_of_job(int(job), int(step) if step.isdecimal() else 0)
    found = {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": str(local),
        "MASTER_ADDR": _first_node(nodes) or "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    for key, value in found.items():
        environment.setdefault(key, value)


def adopt_single(environment: MutableMapping[str, str]) -> None:
    """A process that nobody launched is the only one; DeepSpeed would look for MPI."""
    from zerotrain.machine.ports import free_port

    if "RANK" not in environment:
        environment.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
        environment.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))


def meet(phase: ResolvedPhase) -> None:
    """Let the processes of a training of several meet, with the phase's time-out for every wait.

    The engine, which would do it later, finds them together.

    Raises:
        PipelineError: there are not as many as the phase has.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count != phase.num_processes:
        raise PipelineError(
            f"phase {phase.phase}: launch.num_processes is {phase.num_processes}, and {count} "
            f"{'were' if count > 1 else 'was'} started",
            hint=f"torchrun --nproc_per_node {phase.num_processes}, srun -n "
            f"{phase.num_processes}; or change launch.num_processes",
        )
    if count == 1:
        return
    timeout = timedelta(seconds=phase.ddp_timeout)
    if phase.engine == "deepspeed":
        from zerotrain.training.zero_engine import init_distributed

        init_distributed(timeout)
    else:
        from accelerate import PartialState

        from zerotrain.machine.device import device_type

        PartialState(cpu=device_type() == "cpu", timeout=timeout)


def _first_node(nodes: str) -> str:
    """The first host of Slurm's list: gpu[03-07,12]-ib,big1 gives gpu03-ib."""
    match = re.match(r"([^\[,]*)(?:\[(\w+)[^\]]*\])?([^,]*)", nodes)
    return "".join(part or "" for part in match.groups()) if match else ""
