"""The cluster of this login node, and the jobs submitted from here, as Slurm describes them."""

from __future__ import annotations

import contextlib
import getpass
import grp
import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field

from zerotrain.errors import PipelineError

UNUSABLE = frozenset(
    {"DOWN", "DRAIN", "FAIL", "FAILING", "FUTURE", "INVAL", "INVALID_REG", "NOT_RESPONDING"}
    | {"MAINT", "UNKNOWN"}
)
"""States of nodes that get no jobs; allocated and powered-down nodes will (scontrol, NODES)."""

ANSWER_SECONDS = 60.0
"""Timeout of scontrol and sacct: a busy controller answers late."""


@dataclass(frozen=True)
class Node:
    """A node that can get jobs, now or later."""

    name: str
    cpus: int
    memory_mb: int
    gpus: dict[str, int]
    """GPU counts by type; the type is empty if the cluster names none."""
    features: tuple[str, ...]
    usable: bool
    state: str
    """As Slurm shows it, such as IDLE+DRAIN."""
    partitions: tuple[str, ...]

    @property
    def gpu_count(self) -> int:
        """Return the number of GPUs of all types."""
        return sum(self.gpus.values())


@dataclass(frozen=True)
class Partition:
    """A queue: nodes and the limits of jobs on them."""

    name: str
    up: bool
    default: bool
    minutes: int | None
    """Longest time of a job; None: no limit."""
    priority: int
    """PriorityTier: jobs of a higher tier may preempt those of a lower one."""
    preempt_mode: str
    grace_seconds: int
    accounts: tuple[str, ...]
    """The only accounts that may use it; empty: all may."""
    denied: tuple[str, ...]
    """Accounts that may not use it."""
    closed: str
    """Why it takes no jobs of this user, whatever the account; empty if it does."""
    most_nodes: int | None
    nodes: tuple[Node, ...]
    """The usable nodes."""

    @property
    def gpu_nodes(self) -> list[Node]:
        """List the nodes with GPUs."""
        return [node for node in self.nodes if node.gpu_count]


@dataclass(frozen=True)
class Cluster:
    """Slurm's description of a cluster."""

    version: str
    config: dict[str, str]
    nodes: tuple[Node, ...]
    partitions: tuple[Partition, ...]
    accounting: bool
    """Whether sacct answers."""
    accounts: tuple[str, ...] = ()
    """Accounts of the user, the default first; empty if there is no accounting."""
    most_jobs: int | None = None
    """Number of jobs that the user may have submitted at a time."""
    unanswered: tuple[str, ...] = field(default=())
    """Failed commands, each with its reason."""

    def seconds(self, key: str) -> int | None:
        """Return a duration from slurm.conf; None if it is not a number."""
        found = re.match(r"\d+", self.config.get(key, ""))
        return int(found[0]) if found else None


def ask_slurm() -> Cluster:
    """Query the cluster of this login node.

    Raises:
        PipelineError: Slurm is not installed here, or its controller does not answer.
    """
    for command in ("sinfo", "scontrol", "sbatch"):
        if shutil.which(command) is None:
            raise PipelineError(
                f"this machine has no Slurm: there is no command {command!r}",
                hint="call it on the login node; `module load slurm` first where the cluster "
                "keeps its commands in a module. Other engines: docs/hpc.md",
            )
    version = _answer("sinfo", "--version").split()[-1]
    config = parse_config(_answer("scontrol", "show", "config"))
    nodes = parse_nodes(_answer("scontrol", "show", "node", "-o"))
    partitions = parse_partitions(_answer("scontrol", "show", "partition", "-o"), nodes)
    unanswered: list[str] = []
    accounts: tuple[str, ...] = ()
    most = None
    accounting = True
    try:
        _answer("sacct", "-n", "-X", "-S", "now-1hours", "-o", "jobid")
    except PipelineError as error:
        accounting = False
        unanswered.append(error.what)
    else:
        try:
            # One accounting database may serve several clusters.
            own = f"cluster={config['ClusterName']}"
            wanted = "format=account,defaultaccount,maxsubmit"
            answer = _answer(
                "sacctmgr", "-nP", "show", "user", getpass.getuser(), "-s", own, wanted
            )
            accounts, most = parse_accounts(answer)
        except PipelineError as error:
            unanswered.append(error.what)
    return Cluster(
        version, config, nodes, partitions, accounting, accounts, most, tuple(unanswered)
    )


def parse_config(text: str) -> dict[str, str]:
    """Parse `scontrol show config`: one key per line."""
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {key.strip(): value.strip() for key, _, value in pairs}


def parse_nodes(text: str) -> tuple[Node, ...]:
    """Parse `scontrol show node -o`: one node per line."""
    return tuple(_node(_record(line)) for line in text.splitlines() if "NodeName=" in line)


def parse_partitions(text: str, nodes: tuple[Node, ...]) -> tuple[Partition, ...]:
    """Parse `scontrol show partition -o`: one partition per line.

    Args:
        text: The lines.
        nodes: All nodes; each names its partitions.
    """
    records = [_record(line) for line in text.splitlines() if "PartitionName=" in line]
    return tuple(_partition(record, nodes) for record in records)


def parse_accounts(text: str) -> tuple[tuple[str, ...], int | None]:
    """Parse `sacctmgr -nP show user ME -s format=account,defaultaccount,maxsubmit`.

    Returns:
        The accounts, the default first, and the lowest limit of submitted jobs.
    """
    rows = [line.split("|") for line in text.splitlines() if line.count("|") >= 2]
    names = dict.fromkeys(account for account, *_ in rows if account)
    default = next((row[1] for row in rows if row[1]), "")
    limits = [int(row[2]) for row in rows if row[2].isdecimal()]
    ordered = sorted(names, key=lambda name: name != default)
    return tuple(ordered), min(limits, default=None)


def parse_gres(text: str) -> dict[str, int]:
    """Count the GPUs of a node by type: `gpu:a100:4(S:0-1),nvme:1` has four."""
    found: dict[str, int] = {}
    for name, count in re.findall(r"(?:^|,)gpu((?::[^,:()]+)*?)(?::(\d+))?(?=\(|,|$)", text):
        kind = name.strip(":")
        found[kind] = found.get(kind, 0) + int(count or 1)
    return found


def parse_minutes(text: str) -> int | None:
    """Parse a limit such as `2-00:00:00` or `02:30:00` into minutes; None: no limit."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text)
    if found is None:
        return None
    days, hours, minutes = (int(part or 0) for part in found.groups()[:3])
    return (days * 24 + hours) * 60 + minutes


def _answer(*command: str) -> str:
    """Return what a Slurm command prints; raise if it fails or times out."""
    line = " ".join(command)
    hint = "ask again when the cluster answers `sinfo`; `scontrol ping` says whether it is up"
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ANSWER_SECONDS,
        )
    except OSError as error:
        raise PipelineError(f"`{line}`: {error.strerror}", hint=hint) from error
    except subprocess.TimeoutExpired as error:
        what = f"`{line}` has not answered in {ANSWER_SECONDS:.0f} s"
        raise PipelineError(what, hint=hint) from error
    if done.returncode:
        failure = next(iter(done.stderr.strip().splitlines()), f"code {done.returncode}")
        raise PipelineError(f"`{line}` fails: {failure}", hint=hint)
    return done.stdout


def _node(record: dict[str, str]) -> Node:
    state = record.get("State", "UNKNOWN")
    return Node(
        name=record["NodeName"],
        cpus=int(record.get("CPUEfctv") or record.get("CPUTot", "0")),
        memory_mb=int(record.get("RealMemory", "0")) - int(record.get("MemSpecLimit", "0")),
        gpus=parse_gres(record.get("Gres", "")),
        features=_names(record.get("AvailableFeatures", "")),
        usable="*" not in state and not UNUSABLE & set(re.findall(r"\w+", state)),
        state=state,
        partitions=_names(record.get("Partitions", "")),
    )


def _partition(record: dict[str, str], nodes: tuple[Node, ...]) -> Partition:
    name = record["PartitionName"]
    most = record.get("MaxNodes", "")
    accounts = record.get("AllowAccounts", "ALL")
    return Partition(
        name=name,
        up=record.get("State") == "UP",
        default=record.get("Default") == "YES",
        minutes=parse_minutes(record.get("MaxTime", "")),
        priority=int(record.get("PriorityTier", "1")),
        preempt_mode=record.get("PreemptMode", "OFF"),
        grace_seconds=int(record.get("GraceTime", "0")),
        accounts=() if accounts == "ALL" else _names(accounts),
        denied=_names(record.get("DenyAccounts", "")),
        closed=_closed(record),
        most_nodes=int(most) if most.isdecimal() else None,
        nodes=tuple(node for node in nodes if name in node.partitions and node.usable),
    )


def _closed(record: dict[str, str]) -> str:
    groups = record.get("AllowGroups", "ALL")
    if record.get("RootOnly") == "YES":
        return "for the administrator alone"
    if record.get("ReqResv") == "YES":
        return "only within a reservation"
    if groups != "ALL" and not _own_groups() & set(_names(groups)):
        return f"only for groups {groups}"
    return ""


def _own_groups() -> set[str]:
    """Return the names of this process's groups."""
    found = set()
    for number in {*os.getgroups(), os.getegid()}:
        with contextlib.suppress(KeyError):  # a number without a name
            found.add(grp.getgrgid(number).gr_name)
    return found


def _record(line: str) -> dict[str, str]:
    """Parse the pairs of a line of -o; values may contain blanks, as OS and Reason do."""
    return dict(re.findall(r"(?:^|\s)(\w+)=(.*?)\s*(?=\s\w+=|$)", line))


def _names(text: str) -> tuple[str, ...]:
    return () if text == "(null)" else tuple(filter(None, text.split(",")))
