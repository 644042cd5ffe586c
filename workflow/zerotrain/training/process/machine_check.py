"""Checks of a phase against the machine that it will train on, before any process starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from zerotrain.artifact.documents import check_object, check_type, read_object, read_yaml
from zerotrain.config import optimizers
from zerotrain.errors import PipelineError
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.machine.detect import Machine, notices, usable_engines, usable_precisions
from zerotrain.machine.host import gib
from zerotrain.machine.ports import check_port, free_port

INSTEAD = {"no": "bf16, or zero3_offload", "bf16": "fp16, or no", "fp16": "bf16, or no"}
ELEMENT_BYTES = {"no": 4, "bf16": 2, "fp16": 2}


def check(phase: ResolvedPhase, machine: Machine, processes: int | None = None) -> list[str]:
    """Refuse a phase that the machine cannot run.

    Args:
        phase: The phase.
        machine: The machine.
        processes: Number of its processes on this machine; default: all.

    Returns:
        Messages for the user: an unused accelerator, or an untested one.

    Raises:
        PipelineError: the machine lacks the engine, the precision or the devices.
    """
    if reason := usable_engines(machine)[phase.derived.engine]:
        raise PipelineError(
            f"phase {phase.phase}: preset {phase.launch.preset} cannot run here: {reason}",
            hint=f"write `launch: torch` into the phase {phase.phase}; `launch: auto` would choose "
            "the same",
        )
    usable = usable_precisions(
        machine, phase.derived.engine, swaps_weights=phase.derived.offload_param == "nvme"
    )
    if reason := usable[phase.launch.mixed_precision]:
        more = "; plain PyTorch (launch: torch) trains fp16 here, slowly"
        raise PipelineError(
            f"phase {phase.phase}: mixed_precision {phase.launch.mixed_precision}, but {reason}",
            hint=f"use mixed_precision: {INSTEAD[phase.launch.mixed_precision]}"
            + (more if phase.launch.mixed_precision == "fp16" else ""),
        )
    devices, here = len(machine.devices), processes or phase.launch.num_processes
    if machine.accelerator != "cpu" and here > devices:
        key = "num_processes" if here == phase.launch.num_processes else "processes_per_machine"
        raise PipelineError(
            f"phase {phase.phase}: {here} of its processes are to run here, but this machine "
            f"has {devices} {machine.name} device{'s' if devices != 1 else ''} to use",
            hint=f"a process has a device of its own: give launch.{key} at most that "
            "number; CUDA_VISIBLE_DEVICES, or what the job asks for, may hide some",
        )
    return [f"{phase.phase}: {line}" for line in notices(machine)]


def check_host_memory(phase: ResolvedPhase, machine: Machine, needed: int) -> list[str]:
    """Refuse a phase that does not fit into host memory.

    Args:
        phase: The phase.
        machine: The machine.
        needed: Bytes that its processes keep in host memory in total, pinned if there is a GPU.

    Returns:
        A message if it fits, but not in the memory that is available now.

    Raises:
        PipelineError: it exceeds the memory or a control group's limit.
    """
    host = machine.host
    if needed > host.memory:
        limit = ", a limit of its control group" if host.limit else ""
        raise PipelineError(
            f"phase {phase.phase}: preset {phase.launch.preset} keeps {gib(needed)} in host "
            f"memory, and this machine has {gib(host.memory)}{limit}",
            hint=_smaller_states(phase)
            + "use zero3_nvme with an offload_path on a fast disk, train an adapter (lora), or "
            "take a machine or a job with more memory",
        )
    if needed > host.available:
        return [
            f"{phase.phase}: {gib(needed)} will be kept in host memory, and {gib(host.available)}"
            " are available now: end what else runs here, or the system may kill the training"
        ]
    return []


def _smaller_states(phase: ResolvedPhase) -> str:
    """Return the hint to use bf16 states, if an offloaded Adam does not use them yet."""
    adam = optimizers.is_plain_adam(phase.train.optimizer, phase.train.optimizer_args)
    if phase.launch.bf16_optimizer_states or phase.derived.offload_optimizer != "cpu" or not adam:
        return ""
    return "set launch.bf16_optimizer_states: true (4 bytes a trained parameter less), "


@dataclass(frozen=True)
class _AccelerateFile:
    """What is read here of accelerate.yaml."""

    main_process_port: Annotated[int, Field(ge=0, lt=2**16)] | None = None


@dataclass(frozen=True)
class _OffloadParam:
    """What is read here of zero_optimization.offload_param."""

    device: str = "none"
    buffer_size: Annotated[int, Field(ge=0)] = 0
    buffer_count: Annotated[int, Field(ge=0)] = 0


def check_locked_memory(phase: ResolvedPhase, machine: Machine, launch: Path) -> None:
    """Refuse buffers that cannot be locked into memory: DeepSpeed would crash at a null pointer.

    Raises:
        PipelineError: the buffers of NVMe offload exceed `ulimit -l`.
    """
    lockable = machine.host.lockable
    buffers = _buffer_bytes(phase, read_zero_section(launch))
    if lockable is not None and buffers > lockable:
        raise PipelineError(
            f"phase {phase.phase}: NVMe offload locks buffers of {gib(buffers)} into memory, and "
            f"this user may lock {gib(lockable)} (ulimit -l)",
            hint="raise it: `ulimit -l unlimited` as root, `memlock` in /etc/security/limits.conf, "
            "or `docker run --ulimit memlock=-1`; or use zero3_offload",
        )


def main_process_port(phase: ResolvedPhase, launch: Path) -> int:
    """Return the port for the rendezvous: the one in accelerate.yaml, or any free one.

    Raises:
        PipelineError: the configured port is taken.
    """
    named = configured_port(launch)
    if named is None:
        return free_port()
    check_port(named, phase.phase)
    return named


def configured_port(launch: Path) -> int | None:
    """Return the port in accelerate.yaml, if any."""
    file = launch / "accelerate.yaml"
    return (
        check_type(read_yaml(file, version="1.1"), _AccelerateFile, file).main_process_port or None
    )


def read_zero_section(launch: Path) -> dict[str, Any]:
    """Read a launch's ZeRO settings, zero_optimization in deepspeed.json.

    Raises:
        FileError: the file is missing.
        DocumentError: it is damaged.
    """
    file = launch / "deepspeed.json"
    found = read_object(file).get("zero_optimization")
    return check_object(found, f"{file}: zero_optimization")


def _buffer_bytes(phase: ResolvedPhase, section: dict[str, Any]) -> int:
    """Return the bytes of one process's swap buffers for parameters, without the optimizer's."""
    found = section.get("offload_param", {})
    parameters = check_type(found, _OffloadParam, "zero_optimization.offload_param")
    if parameters.device != "nvme":
        return 0
    elements = parameters.buffer_size * parameters.buffer_count
    return elements * ELEMENT_BYTES[phase.launch.mixed_precision]
