"""A cluster as Slurm describes it to a user on the login node."""

from __future__ import annotations

import contextlib
import grp
import os
import re
from dataclasses import dataclass, field

UNUSABLE = frozenset(
    {"DOWN", "DRAIN", "FAIL", "FAILING", "FUTURE", "INVAL", "INVALID_REG", "NOT_RESPONDING"}
    | {"MAINT", "UNKNOWN"}
)
"""States of nodes that get no job; allocated and powered-down ones will (scontrol, NODES)."""


@dataclass(frozen=True)
class Node:
    """A node that jobs may get, now or when it is free."""

    name: str
    cpus: int
    memory_mb: int
    gpus: dict[str, int]
    """GPUs by type; the type is empty where the cluster names none."""
    features: tuple[str, ...]
    usable: bool
    state: str
    """As Slurm shows it: IDLE+DRAIN."""
    partitions: tuple[str, ...]

    @property
    def gpu_count(self) -> int:
        """GPUs of all types."""
        return sum(self.gpus.values())


@dataclass(frozen=True)
class Partition:
    """A queue: nodes and the limits of jobs on them."""

    name: str
    up: bool
    default: bool
    minutes: int | None
    """Longest job; None has no limit."""
    priority: int
    """PriorityTier: jobs of a higher one may preempt those of a lower."""
    preempt_mode: str
    grace_seconds: int
    accounts: tuple[str, ...]
    """Accounts that alone may use it; empty: all."""
    denied: tuple[str, ...]
    """Accounts that may not."""
    closed: str
    """Why it takes no job of this user, whatever the account; empty: it does."""
    most_nodes: int | None
    nodes: tuple[Node, ...]
    """Those that can be used."""

    @property
    def gpu_nodes(self) -> list[Node]:
        """Nodes with GPUs."""
        return [node for node in self.nodes if node.gpu_count]


@dataclass(frozen=True)
class Cluster:
    """All that Slurm says."""

    version: str
    config: dict[str, str]
    nodes: tuple[Node, ...]
    partitions: tuple[Partition, ...]
    accounting: bool
    """Whether sacct answers."""
    accounts: tuple[str, ...] = ()
    """Accounts of the user, the default one first; empty where none is kept."""
    most_jobs: int | None = None
    """Jobs that the user may have submitted at a time."""
    unanswered: tuple[str, ...] = field(default=())
    """Commands that failed, with the reason."""

    def seconds(self, key: str) -> int | None:
        """A duration of slurm.conf; None where it is not a number."""
        found = re.match(r"\d+", self.config.get(key, ""))
        return int(found[0]) if found else None


def parse_config(text: str) -> dict[str, str]:
    """`scontrol show config`: one key a line."""
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {key.strip(): value.strip() for key, _, value in pairs}


def parse_nodes(text: str) -> tuple[Node, ...]:
    """`scontrol show node -o`: a node a line."""
    return tuple(_node(_record(line)) for line in text.splitlines() if "NodeName=" in line)


def parse_partitions(text: str, nodes: tuple[Node, ...]) -> tuple[Partition, ...]:
    """`scontrol show partition -o`: a partition a line.

    Args:
        text: The lines.
        nodes: All nodes; each names the partitions that it is of.
    """
    records = [_record(line) for line in text.splitlines() if "PartitionName=" in line]
    return tuple(_partition(record, nodes) for record in records)


def parse_accounts(text: str) -> tuple[tuple[str, ...], int | None]:
    """`sacctmgr -nP show user ME -s format=account,defaultaccount,maxsubmit`.

    Returns:
        The accounts, the default one first, and the least limit of submitted jobs.
    """
    rows = [line.split("|") for line in text.splitlines() if line.count("|") >= 2]
    names = dict.fromkeys(account for account, *_ in rows if account)
    default = next((row[1] for row in rows if row[1]), "")
    limits = [int(row[2]) for row in rows if row[2].isdecimal()]
    ordered = sorted(names, key=lambda name: name != default)
    return tuple(ordered), min(limits, default=None)


def parse_gres(text: str) -> dict[str, int]:
    """GPUs of a node by type: `gpu:a100:4(S:0-1),nvme:1` has four."""
    found: dict[str, int] = {}
    for name, count in re.findall(r"(?:^|,)gpu((?::[^,:()]+)*?)(?::(\d+))?(?=\(|,|$)", text):
        kind = name.strip(":")
        found[kind] = found.get(kind, 0) + int(count or 1)
    return found


def parse_minutes(text: str) -> int | None:
    """A limit as `2-00:00:00` or `02:30:00` in minutes; None has no limit, or states none."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text)
    if found is None:
        return None
    days, hours, minutes = (int(part or 0) for part in found.groups()[:3])
    return (days * 24 + hours) * 60 + minutes


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
    """Names of the groups that this process is in."""
    found = set()
    for number in {*os.getgroups(), os.getegid()}:
        with contextlib.suppress(KeyError):  # a number without a name
            found.add(grp.getgrgid(number).gr_name)
    return found


def _record(line: str) -> dict[str, str]:
    """Pairs of a line of -o; values may hold blanks, as OS and Reason do."""
    return dict(re.findall(r"(?:^|\s)(\w+)=(.*?)\s*(?=\s\w+=|$)", line))


def _names(text: str) -> tuple[str, ...]:
    return () if text == "(null)" else tuple(filter(None, text.split(",")))
