"""Comparison of a run's phases with a partition."""

from __future__ import annotations

from collections.abc import Iterator

from zerotrain.config.run import RunConfig
from zerotrain.errors import PipelineError
from zerotrain.graph.cluster.findings import Finding, devices
from zerotrain.graph.cluster.slurm import Partition
from zerotrain.launch.planner.forecast import machine_memory
from zerotrain.machine.host import gib

MEBI = 2**20


def of_phases(config: RunConfig, partition: Partition) -> list[Finding]:
    """Compare the nodes, GPUs, memory and CPU threads of each phase with a partition's.

    Args:
        config: The run.
        partition: The partition that the run trains in.
    """
    found: list[Finding] = []
    for phase in config.phases:
        launch = phase.launch
        each = launch.num_processes // launch.machines
        found += _held(phase.name, launch.machines, each, partition)
        found.append(_memory(config, phase.name, partition))
        found += _threads(phase.name, launch.num_cpu_threads_per_process, each, partition)
    return found


def _held(phase: str, machines: int, each: int, partition: Partition) -> Iterator[Finding]:
    gpus = bool(partition.gpu_nodes)
    fit = [node for node in partition.nodes if not gpus or node.gpu_count >= each]
    what = f"{each} GPU{'s' if each > 1 else ''}" if gpus else "CPUs alone"
    asks = f"phase {phase} asks for {machines} node{'s' if machines > 1 else ''} with {what}"
    limit = partition.most_nodes
    if limit is not None and limit < machines:
        yield Finding(
            "problem",
            f"{asks}; a job in {partition.name} gets {limit} at most",
            f"launch.machines: {limit} or less, or another partition (--partition)",
        )
    elif len(fit) < machines:
        has = f"GPUs {devices(partition.nodes)}" if gpus else f"{len(partition.nodes)} nodes"
        yield Finding(
            "problem",
            f"{asks}; {partition.name} has {len(fit)} such ({has})",
            "launch.machines and launch.processes_per_machine that fit, or another partition "
            "(--partition)",
        )
    else:
        yield Finding("ok", f"{asks}; {partition.name} has {len(fit)}")


def _memory(config: RunConfig, phase: str, partition: Partition) -> Finding:
    """Compare the planner's memory forecast per node with the nodes' memory."""
    try:
        needed = machine_memory(config, phase, cpu=not partition.gpu_nodes)["train_phase"]
    except PipelineError as error:
        return Finding(
            "warn", f"phase {phase}: its memory cannot be forecast: {error.what}", error.hint
        )
    asks = f"phase {phase} takes {gib(needed)} of a node's memory by the planner's forecast"
    most = max(node.memory_mb for node in partition.nodes) * MEBI
    if needed <= most:
        return Finding("ok", f"{asks}; {partition.name} has nodes of {gib(most)}")
    return Finding(
        "problem",
        f"{asks}; the largest of {partition.name} has {gib(most)}",
        "a preset that keeps less in host memory, more machines, or another partition "
        "(--partition); `zerotrain plan CONFIG` shows the presets",
    )


def _threads(phase: str, threads: int | None, each: int, partition: Partition) -> Iterator[Finding]:
    cpus = min(node.cpus for node in partition.nodes)
    share = max(1, cpus // each)
    key = "launch.num_cpu_threads_per_process"
    if threads is None:
        yield Finding(
            "warn",
            f"phase {phase}: {key} is not set: it takes the cores of the node that trains, and "
            "other counts give other bits",
            f"set it; {share} or less fits a node of {partition.name} with {cpus} CPUs",
        )
    elif threads * each > cpus:
        yield Finding(
            "problem",
            f"phase {phase}: {each} x {threads} CPU threads; a node of {partition.name} has {cpus}",
            f"{key}: {share} or less",
        )
