"""The partition and account for a user's trainings."""

from __future__ import annotations

from dataclasses import dataclass

from zerotrain.errors import PipelineError
from zerotrain.graph.cluster.slurm import Cluster, Partition


@dataclass(frozen=True)
class Choice:
    """The partitions and the account of jobs."""

    training: Partition
    """For jobs that use GPUs, if the cluster has any."""
    other: Partition
    """For jobs without GPUs; the training partition if no other fits better."""
    account: str | None
    """The account that Slurm bills; None: no account is passed."""


def choose(cluster: Cluster, partition: str | None = None, account: str | None = None) -> Choice:
    """Choose partitions: GPUs first, then no preemption, then the longest time limit.

    Args:
        cluster: Slurm's description of the cluster.
        partition: The partition for training, if the user names it.
        account: The account, if the user names it; default: the user's default account.

    Raises:
        PipelineError: there is no such partition, or none that this user may use.
    """
    account = account or next(iter(cluster.accounts), None)
    usable = [one for one in cluster.partitions if one.up and one.nodes and _open(one, account)]
    if partition is None:
        training = max(usable, key=lambda one: _rank(one, cluster), default=None)
        wanted = "a partition that is up, has nodes that answer and is open to you"
    else:
        training = next((one for one in usable if one.name == partition), None)
        wanted = f"a partition {partition!r} that is up, has nodes that answer and is open to you"
    if training is None:
        seen = ", ".join(f"{one.name} ({_refusal(one, account)})" for one in cluster.partitions)
        raise PipelineError(
            f"this cluster has not {wanted}; it has: {seen or 'none'}",
            hint="`sinfo` shows the partitions; name another with --partition, or an account "
            "with --account",
        )
    without = [one for one in usable if not one.gpu_nodes or one.default]
    other = max(without, key=lambda one: (one.default, _minutes(one)), default=training)
    return Choice(training, other, account)


def preemptors(partition: Partition, cluster: Cluster) -> list[Partition]:
    """List the partitions whose jobs may preempt jobs of this one."""
    if cluster.config.get("PreemptType") != "preempt/partition_prio":
        return []
    names = {node.name for node in partition.nodes}
    return [
        one
        for one in cluster.partitions
        if one.priority > partition.priority and names & {node.name for node in one.nodes}
    ]


def preempt_mode(partition: Partition, cluster: Cluster) -> str:
    """Return the preemption mode of a partition; OFF if its jobs are not preempted."""
    kind = cluster.config.get("PreemptType", "preempt/none")
    if kind == "preempt/qos":
        return cluster.config.get("PreemptMode", "OFF")
    return partition.preempt_mode if preemptors(partition, cluster) else "OFF"


def _rank(partition: Partition, cluster: Cluster) -> tuple[object, ...]:
    return (
        bool(partition.gpu_nodes),
        preempt_mode(partition, cluster) == "OFF",
        _minutes(partition),
        max((node.gpu_count for node in partition.nodes), default=0),
        len(partition.nodes),
        partition.default,
    )


def _minutes(partition: Partition) -> float:
    return float("inf") if partition.minutes is None else partition.minutes


def _open(partition: Partition, account: str | None) -> bool:
    named = not partition.accounts or account in partition.accounts
    return named and account not in partition.denied and not partition.closed


def _refusal(partition: Partition, account: str | None) -> str:
    if not partition.up:
        return "not up"
    if partition.closed:
        return partition.closed
    if account in partition.denied:
        return f"not for account {account}"
    if not _open(partition, account):
        return f"only for accounts {', '.join(partition.accounts)}"
    return "usable" if partition.nodes else "no node answers"
