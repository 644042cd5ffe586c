"""The values of a phase that continues another on other processes or in another precision.

The global batch stays: the samples of a step, and their order, are those of the phase before. Only
how its processes share them follows from their number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

from zerotrain.config.launch import LaunchConfig
from zerotrain.config.models import Phase
from zerotrain.errors import PipelineError

PRECISIONS = get_args(LaunchConfig.model_fields["mixed_precision"].annotation)


@dataclass(frozen=True, kw_only=True)
class Relaunch:
    """A user's wishes for the new phase's launch; None: as it is."""

    num_processes: int | None = None
    machines: int | None = None
    mixed_precision: str | None = None

    def flags(self) -> dict[str, int | str]:
        """Return what is asked for, by key."""
        return {key: value for key, value in vars(self).items() if value is not None}


def check_relaunch(wanted: Relaunch) -> None:
    """Check each value by itself.

    Raises:
        PipelineError: no such precision, or a count below 1.
    """
    if wanted.mixed_precision not in (None, *PRECISIONS):
        raise PipelineError(
            f"--mixed-precision {wanted.mixed_precision}: no such precision",
            hint=f"it takes {', '.join(PRECISIONS[:-1])} or {PRECISIONS[-1]}",
        )
    for flag, count in (("processes", wanted.num_processes), ("machines", wanted.machines)):
        if count is not None and count < 1:
            name = f"--num-{flag}" if flag == "processes" else f"--{flag}"
            raise PipelineError(f"{name} {count}: it takes a number from 1", hint="give 1 or more")


def launch_values(phase: Phase, wanted: Relaunch) -> dict[str, Any]:
    """Return the launch values that differ in the new phase.

    Machines alone keep the number of processes on each of them. Of `num_processes` and
    `processes_per_machine` those are given that the configuration has, so that none contradicts
    another.

    Raises:
        PipelineError: the machines cannot have equally many processes.
    """
    launch = phase.launch
    found: dict[str, Any] = {}
    machines = wanted.machines or launch.machines
    count = processes_of(phase, wanted)
    if count % machines:
        flags = f"--num-processes {count} --machines {machines}"
        raise PipelineError(
            f"{flags}: no equal number of processes on each machine",
            hint=f"give a multiple of {machines}, or another --machines",
        )
    new = {
        "num_processes": count,
        "machines": machines,
        "processes_per_machine": count // machines,
    }
    if wanted.num_processes or wanted.machines:
        for key in _process_keys(launch):
            if new[key] != getattr(launch, key):
                found[key] = new[key]
    if wanted.mixed_precision not in (None, launch.mixed_precision):
        found["mixed_precision"] = wanted.mixed_precision
    return found


def processes_of(phase: Phase, wanted: Relaunch) -> int:
    """Return the processes of the new phase on all machines."""
    machines = wanted.machines or phase.launch.machines
    return wanted.num_processes or _each(phase.launch) * machines


def processes_before(phase: Phase, count: int) -> dict[str, int]:
    """Return launch values that give a phase back the number of processes that trained it.

    How they were spread over machines is not known; a spread that is possible is given.
    """
    launch, found = phase.launch, {"num_processes": count}
    machines = launch.machines
    if "processes_per_machine" in launch.model_fields_set:
        each = _each(launch)
        if count % each == 0:
            machines = count // each
        elif count % machines == 0:
            found["processes_per_machine"] = count // machines
        else:
            machines, found["processes_per_machine"] = 1, count
        if "num_processes" not in launch.model_fields_set:
            del found["num_processes"]
    elif count % machines:
        machines = 1
    return found if machines == launch.machines else {**found, "machines": machines}


def share_batch(
    global_batch: int, processes: int, micro: int, *, where: str = "", machines: int = 1
) -> int:
    """Return the accumulations by which processes share a global batch in micro batches.

    Args:
        global_batch: Samples per optimizer step.
        processes: Processes that share it.
        micro: Samples that fit into one pass of a process.
        where: The phase, for messages.
        machines: Machines that have equally many of the processes.

    Returns:
        The smallest number whose micro batch is not larger than `micro`.

    Raises:
        PipelineError: the processes cannot share it equally; the message has the numbers that can.
    """
    if global_batch % processes:
        known = [
            str(n) for n in range(machines, global_batch + 1, machines) if not global_batch % n
        ]
        listed = " or ".join([", ".join(known[:-1]), known[-1]]) if known[1:] else "".join(known)
        raise PipelineError(
            f"{where}{': ' * bool(where)}global_batch_size {global_batch} cannot be shared equally "
            f"by {processes} processes",
            hint=f"--num-processes takes {listed}"
            if known
            else f"{machines} machines cannot share it at all: choose fewer --machines",
        )
    share = global_batch // processes
    return next(n for n in range(1, share + 1) if share % n == 0 and share // n <= micro)


def _each(launch: LaunchConfig) -> int:
    return launch.num_processes // launch.machines


def _process_keys(launch: LaunchConfig) -> list[str]:
    given = launch.model_fields_set & {"num_processes", "processes_per_machine"}
    return [*sorted(given or {"num_processes"}), "machines"]
