"""A starter Snakemake profile for a cluster; each entry states its reason."""

from __future__ import annotations

import builtins
import textwrap
from dataclasses import dataclass
from keyword import kwlist
from pathlib import Path

import yaml
from jinja2 import Environment, StrictUndefined

from zerotrain.artifact import write_whole
from zerotrain.config.scalar import one_line
from zerotrain.errors import PipelineError
from zerotrain.graph.cluster.slurm import Cluster, Partition
from zerotrain.graph.cluster.trial import Trial


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


FILE = "config.yaml"
TEMPLATE = Path(__file__).with_name("profile.yaml.j2")
WIDTH = 100
JOBS = 100
FIRST_LOOK = 40
"""Seconds until the executor first queries the state of jobs."""
WARNING = 120
"""Seconds before the time limit at which a checkpoint is requested."""
DAY = 24 * 60
UNKNOWN_LATENCY = 60
"""Seconds after which NFS caches are refreshed."""
LONGEST_STAGE = 2 * 480
"""Minutes that a stage may request at its last attempt (rules/cache_latents.smk)."""
TRAINING = "train_phase"
GPU_RULES = ("encode_shard", "cache_latents", "evaluate")
NO_GPU_RULES = (
    *("prepare_dataset", "build_base", "build_shared_base"),
    *("import_checkpoint", "export_weights"),
)
EVALUATED = {*dir(builtins), *kwlist, "input", "attempt", "threads", "wildcards"}
"""Names that Snakemake would evaluate as something other than text."""


def check_absent(folder: Path) -> None:
    """Check that no profile would be overwritten.

    Raises:
        PipelineError: there is a profile already.
    """
    if (folder / FILE).exists():
        raise PipelineError(
            f"{folder / FILE} is there already and may hold what you have set",
            hint="name another folder with --output, or replace it with --force",
        )


def write_profile(folder: Path, text: str) -> None:
    """Write a profile's config.yaml.

    Raises:
        PipelineError: the folder is not writable.
    """
    try:
        write_whole(folder / FILE, text)
    except OSError as error:
        raise PipelineError(
            f"{folder / FILE} cannot be written: {error.strerror}", hint="name a folder of yours"
        ) from error


def render_profile(cluster: Cluster, choice: Choice, trial: Trial | None) -> str:
    """Render config.yaml.

    Args:
        cluster: Slurm's description of the cluster.
        choice: The partitions and the account of jobs.
        trial: The report of the trial job, if one ran.
    """
    seen_after = trial.seen_after if trial else None
    if trial and seen_after is not None:
        seen_after = max(seen_after, trial.facts.get("asked_after") or 0.0)
    environment = Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
        finalize=lambda value: one_line(str(value)),
    )
    environment.filters |= {"comment": _comment, "scalar": _scalar}
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        **{name: value for name, value in globals().items() if name.isupper()},
        cluster=cluster,
        choice=choice,
        one=choice.training,
        job_age=cluster.seconds("MinJobAge"),
        preempted=preempt_mode(choice.training, cluster) != "OFF",
        seen_after=seen_after,
    )


def _scalar(value: str) -> str:
    """Format a text as YAML; quote what Snakemake could evaluate as Python, such as `all.q`."""
    if not value.startswith("--"):
        plain = value.isidentifier() and value not in EVALUATED
        value = value if plain else repr(value)
    return yaml.safe_dump(value, width=WIDTH).removesuffix("\n...\n").strip()


def _comment(text: str, indent: str = "") -> str:
    margin = f"{indent}# "
    return (
        textwrap.fill(text.strip(), WIDTH, initial_indent=margin, subsequent_indent=margin) + "\n"
    )
