"""Findings about a cluster and a trial job on it: one sentence each, with a remedy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from zerotrain.config.run import RunConfig
from zerotrain.config.suggestions import join_first
from zerotrain.errors import PipelineError
from zerotrain.graph.cluster.profile import Choice, preempt_mode, preemptors
from zerotrain.graph.cluster.slurm import Cluster, Node, Partition
from zerotrain.graph.cluster.trial import Trial
from zerotrain.launch.planner.forecasts import machine_memory
from zerotrain.machine.host import gib

LEAST_JOB_AGE = 180
"""Seconds: the executor's longest interval between two queries of its jobs."""
LARGEST_SKEW = 1.0
"""Seconds: Snakemake compares mtimes of files written on different machines."""
SMALL_TEMPORARY = 20 * 10**9
"""Bytes that a node-local copy of a cache soon exceeds."""
BUSY = ("Requested nodes are busy", "Immediate execution impossible")
"""What srun prints if a job timed out in the queue, but not if it can never run."""


@dataclass(frozen=True)
class Finding:
    """One sentence; level `problem` would stop a training."""

    level: Literal["ok", "warn", "problem"]
    text: str
    todo: str = ""

    def __str__(self) -> str:
        return f"{self.level:<8}{self.text}" + (f"\n{'':8}-> {self.todo}" if self.todo else "")


def of_cluster(cluster: Cluster, choice: Choice) -> list[Finding]:
    """Return the findings from the login node's answers."""
    one = choice.training
    return [
        Finding("ok", f"Slurm {cluster.version}, cluster {cluster.config.get('ClusterName')}"),
        *(Finding("ok", _said(partition)) for partition in cluster.partitions),
        *_nodes(cluster),
        Finding("ok", f"trainings go to {one.name}, other jobs to {choice.other.name}"),
        *_gpus(choice),
        *_limit(one),
        *_accounting(cluster, choice),
        *_preemption(cluster, one),
        *_ending(cluster),
        *_memory(cluster),
    ]


def of_trial(trial: Trial, partition: Partition) -> list[Finding]:
    """Return the findings from the report of a job on a compute node."""
    facts = trial.facts
    if "time" not in facts:
        return [_no_start(trial)]
    found = [Finding("ok", f"a job ran on {facts['host']} by `{' '.join(trial.command[:4])} ...`")]
    found += [_clock(trial), _folder(trial)]
    if "temporary" not in facts:
        return [*found, Finding("problem", f"the job ended early: {trial.failure}")]
    found += [_torch(trial, partition), _temporary(trial), _hub(trial)]
    return found


def devices(nodes: Iterable[Node]) -> str:
    """Describe the GPUs of nodes: `2 x 4 a100, 1 x 8 h100`."""
    kinds: dict[str, int] = {}
    for node in nodes:
        for kind, count in node.gpus.items():
            name = f"{count} {kind or 'GPUs'}"
            kinds[name] = kinds.get(name, 0) + 1
    return ", ".join(f"{count} x {name}" for name, count in kinds.items())


def _said(one: Partition) -> str:
    limit = "no time limit" if one.minutes is None else f"{one.minutes} minutes at most"
    known = [
        f"{one.name}{' (default)' if one.default else ''}: {len(one.nodes)} usable nodes",
        f"{limit}",
    ]
    if one.nodes:
        known.append(f"{_range(node.cpus for node in one.nodes)} CPUs")
        known.append(f"{_range(node.memory_mb for node in one.nodes)} MB of memory a node")
    known.append(f"GPUs {devices(one.nodes)}" if one.gpu_nodes else "no GPUs")
    features = {name for node in one.nodes for name in node.features}
    if features:
        known.append(f"features {' '.join(sorted(features))}")
    if one.accounts:
        known.append(f"for accounts {' '.join(one.accounts)} alone")
    if one.denied:
        known.append(f"not for accounts {' '.join(one.denied)}")
    if one.closed:
        known.append(one.closed)
    if not one.up:
        known.append("not up")
    return ", ".join(known)


def _range(counts: Iterable[int]) -> str:
    found = sorted(set(counts))
    return str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1]}"


def _nodes(cluster: Cluster) -> Iterator[Finding]:
    away = [f"{node.name} ({node.state})" for node in cluster.nodes if not node.usable]
    if away:
        what = f"nodes that take no jobs now: {join_first(away)}"
        yield Finding("warn", what, "`sinfo -R` says why")


def _gpus(choice: Choice) -> Iterator[Finding]:
    one = choice.training
    if not one.gpu_nodes:
        yield Finding(
            "warn",
            f"{one.name} has no GPUs that Slurm knows of: trainings compute on CPUs",
            "name a partition with GPUs by --partition, if the cluster has one",
        )
    kinds = {kind for node in one.nodes for kind in node.gpus}
    if len(kinds) > 1:
        names = ", ".join(sorted(kind or "of no type" for kind in kinds))
        yield Finding(
            "warn",
            f"{one.name} has GPUs of several types ({names}): a job may get any of them",
            "ask for a type in the profile, under set-resources of train_phase, evaluate and "
            "cache_latents: constraint: FEATURE of its nodes; or gres, which then counts as well: "
            "docs/hpc.md, 3",
        )


def _limit(one: Partition) -> Iterator[Finding]:
    if one.minutes is not None and one.minutes < 30:
        yield Finding(
            "warn",
            f"{one.name} ends jobs after {one.minutes} minutes: starting takes a part of each",
            "name a partition with a longer limit by --partition",
        )


def _accounting(cluster: Cluster, choice: Choice) -> Iterator[Finding]:
    age = cluster.seconds("MinJobAge")
    if cluster.accounting:
        named = f"account {choice.account}" if choice.account else "no account is needed"
        others = [name for name in cluster.accounts if name != choice.account]
        also = f", others of yours: {', '.join(others)}" if others else ""
        yield Finding("ok", f"accounting answers (sacct), {named}{also}")
    else:
        yield Finding(
            "warn",
            f"there is no accounting: {'; '.join(cluster.unanswered)}",
            "the profile asks squeue for the state of jobs; by sacct the executor waits for ever",
        )
        if age is not None and age < LEAST_JOB_AGE:
            yield Finding(
                "warn",
                f"Slurm forgets a job {age} s after its end (MinJobAge), and without accounting "
                f"the executor, which asks every {LEAST_JOB_AGE} s or less, may never learn of it",
                "ask the administrators for MinJobAge=300 or for accounting",
            )
    if cluster.most_jobs is not None:
        yield Finding("ok", f"you may have {cluster.most_jobs} jobs submitted at a time")


def _preemption(cluster: Cluster, one: Partition) -> Iterator[Finding]:
    mode = preempt_mode(one, cluster)
    by = ", ".join(other.name for other in preemptors(one, cluster)) or "jobs of a higher QOS"
    if "OFF" in mode:
        yield Finding("ok", f"jobs in {one.name} are not preempted")
    elif "REQUEUE" in mode:
        grace = f"{one.grace_seconds} s after SIGTERM" if one.grace_seconds else "at once"
        yield Finding(
            "ok",
            f"jobs in {one.name} may be preempted by {by} and are requeued ({grace}): training "
            "resumes from its newest checkpoint",
        )
    else:
        yield Finding(
            "warn",
            f"jobs in {one.name} may be preempted by {by} with PreemptMode={mode}: the executor "
            "does not see the end of a cancelled one and waits for ever",
            "name another partition by --partition; or, when it happens, end snakemake with "
            "Ctrl-C and start it again",
        )
    if cluster.config.get("JobRequeue") == "0":
        yield Finding("ok", "jobs are requeued only where they ask for it (JobRequeue=0): ours do")


def _ending(cluster: Cluster) -> Iterator[Finding]:
    wait = cluster.seconds("KillWait")
    if wait is not None:
        yield Finding(
            "ok",
            f"at the time limit Slurm kills {wait} s after SIGTERM: the profile asks for a "
            "checkpoint earlier (--signal)",
        )


def _memory(cluster: Cluster) -> Iterator[Finding]:
    ends = "OverMemoryKill" in cluster.config.get("JobAcctGatherParams", "") or (
        "cgroup" in cluster.config.get("TaskPlugin", "")
        and cluster.config.get("ConstrainRAMSpace") == "yes"  # cgroup.conf, shown with the rest
    )
    counted = "MEMORY" in cluster.config.get("SelectTypeParameters", "").upper()
    if not counted:
        yield Finding(
            "warn",
            "Slurm does not hand out memory (SelectTypeParameters): jobs on one node may together "
            "take more than it has",
            "ask for whole nodes: add --exclusive to slurm_extra in the profile",
        )
    elif ends:
        yield Finding("ok", "a job that takes more memory than it asked for is ended")
    else:
        yield Finding("ok", "memory is handed out; nothing here ends a job that takes more")


def _no_start(trial: Trial) -> Finding:
    if any(text in trial.failure for text in BUSY):
        return Finding(
            "warn",
            f"no node was free for a trial: {trial.failure}",
            "wait longer with --wait SECONDS, or look at the rest with --no-job; with --wait 1 "
            "Slurm says so where something else than full nodes is the reason",
        )
    if "Unable to allocate" in trial.failure:
        return Finding(
            "problem",
            f"Slurm refuses a trial job: {trial.failure}",
            "name another partition or account with --partition and --account; by hand: "
            f"`{' '.join(trial.command)}`",
        )
    return Finding(
        "problem",
        f"the project's Python does not start on a node: {trial.failure}",
        "install the project (make setup) on a folder that the nodes see, with a Python that they "
        f"have too; by hand: `{' '.join(trial.command)}`",
    )


def _clock(trial: Trial) -> Finding:
    skew = trial.skew_seconds or 0.0
    if abs(skew) <= LARGEST_SKEW:
        return Finding("ok", f"its clock and this one differ by {abs(skew):.2f} s or less")
    way = "ahead of" if skew > 0 else "behind"
    return Finding(
        "problem",
        f"its clock is {abs(skew):.1f} s {way} this one: Snakemake takes files for older than "
        "they are",
        "ask the administrators to set the clocks (NTP)",
    )


def _folder(trial: Trial) -> Finding:
    if trial.facts.get("asked_after") is None:
        return Finding(
            "problem",
            "the node does not see a file that was written here",
            "move the project to a file system that all nodes share (`df -T .` names this one's)",
        )
    if trial.seen_after is None:
        return Finding(
            "problem",
            "what the node wrote is not seen here",
            "move the project to a file system that all nodes share",
        )
    slower = max(trial.facts["asked_after"], trial.seen_after)
    return Finding("ok", f"the project's folder is shared: a file is seen after {slower:.1f} s")


def _torch(trial: Trial, partition: Partition) -> Finding:
    facts = trial.facts
    if facts["torch"]:
        return Finding(
            "problem", f"torch does not load there: {facts['torch']}", "`make setup`, then again"
        )
    if partition.gpu_nodes and facts["accelerator"] == "cpu":
        why = facts["unused"] or "the job got a GPU by Slurm, but torch finds none"
        return Finding(
            "problem",
            f"torch computes on the CPU there: {why}",
            "`make setup` where a GPU is seen, or with the build of torch that fits it; "
            "`nvidia-smi` in a job of that partition shows driver and GPUs",
        )
    return Finding("ok", f"torch loads there and computes on {facts['machine']}")


def _temporary(trial: Trial) -> Finding:
    place, free = trial.facts["temporary"], trial.facts["temporary_free"]
    disk = f"a job's own disk, {place}, has {free / 1e9:.0f} GB free"
    if free < SMALL_TEMPORARY:
        return Finding("warn", disk, "too small for a cache or a swap folder: keep them shared")
    return Finding("ok", f"{disk}: room for node-local scratch")


def _hub(trial: Trial) -> Finding:
    if trial.facts["hub"]:
        return Finding(
            "warn",
            f"compute nodes do not reach the hub ({trial.facts['hub']})",
            "call `zerotrain fetch` here before the jobs; see docs/hpc.md",
        )
    return Finding("ok", "compute nodes reach the hub")


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
        found.append(_forecast(config, phase.name, partition))
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


def _forecast(config: RunConfig, phase: str, partition: Partition) -> Finding:
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
