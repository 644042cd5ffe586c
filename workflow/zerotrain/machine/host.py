"""Memory and cores available to a process, which a container or a cluster's job may limit."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

CAP_IPC_LOCK = 14
"""Number of the capability that lets a process lock memory without a limit."""
FP16_FLAGS = {"avx512_fp16", "avx_ne_convert"}
"""With either flag torch's oneDNN computes fp16 on x86 (ideep::has_fp16_type_support)."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """Memory and cores of a machine for this process. Sizes are bytes."""

    memory: int
    """Memory that all processes under our limit may use: the machine's, or a smaller limit."""
    available: int
    """Memory that can be allocated now, without swapping."""
    limit: int | None = None
    """A control group's memory limit, if it is below the machine's memory."""
    lockable: int | None = None
    """Memory that may be locked (ulimit -l); None: no limit."""
    cores: int
    """Cores that this process may run on."""
    quota: float | None = None
    """A control group's CPU quota in cores, if it is lower."""
    fp16: bool = False
    """Whether the processor computes fp16, as DeepSpeed checks it."""


def gib(count: int) -> str:
    """Format bytes of memory: 23.5 GiB."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def detect_host(root: Path = Path("/")) -> Host:
    """Read the kernel's values for memory and cores, and the limits of our control groups.

    Args:
        root: The root of /proc and /sys.
    """
    found = psutil.virtual_memory()
    limits = [*_memory_limits(root)]
    limit = min((most for most, _ in limits), default=found.total)
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    quota = min(_cpu_quotas(root), default=float(cores))
    return Host(
        memory=min(found.total, limit),
        available=max(0, min(found.available, *(most - used for most, used in limits)))
        if limits
        else found.available,
        limit=limit if limit < found.total else None,
        lockable=_lockable(root),
        cores=cores,
        quota=quota if quota < cores else None,
        fp16=_computes_fp16(root),
    )


def oom_kills(root: Path = Path("/")) -> tuple[int, int]:
    """Count the processes that the kernel has killed for memory: in our control group, and overall.

    Args:
        root: The root of /proc and /sys.
    """
    files = [group / "memory.events" for group in _groups(root, "")]
    files += [group / "memory.oom_control" for group in _groups(root, "memory")]
    own = next((text for file in files if (text := _text(file))), "")
    return _counter(own, "oom_kill"), _counter(_text(root / "proc/vmstat"), "oom_kill")


def _counter(text: str, name: str) -> int:
    found = [line.split()[1] for line in text.splitlines() if line.split()[:1] == [name]]
    return int(found[0]) if found else 0


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield the memory limit and use of each control group above us, versions 2 and 1.

    Pages of files that were read only once are dropped before an allocation fails, and count as
    free.
    """
    names = {
        "": ("memory.max", "memory.current", "inactive_file"),
        "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    }
    for controller, (most, used, droppable) in names.items():
        for group in _groups(root, controller):
            try:
                limit, usage = (
                    int((group / most).read_text(encoding="utf-8")),
                    int((group / used).read_text(encoding="utf-8")),
                )
                stat = dict(
                    line.split()
                    for line in (group / "memory.stat").read_text(encoding="utf-8").split("\n")
                    if line
                )
            except (OSError, ValueError):  # no such file, or "max"
                continue
            yield limit, max(0, usage - int(stat.get(droppable, 0)))


def _cpu_quotas(root: Path) -> Iterator[float]:
    for group in _groups(root, ""):
        quota, _, period = _text(group / "cpu.max").partition(" ")
        if quota.isdecimal():
            yield int(quota) / int(period)
    for group in _groups(root, "cpu"):
        quota, period = _text(group / "cpu.cfs_quota_us"), _text(group / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal():
            yield int(quota) / int(period)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of our control group and those above it; "" is version 2's hierarchy.

    A container sees its group as the root, whatever path /proc gives.
    """
    mount = root / "sys/fs/cgroup" / controller
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            group = mount / path.strip("/")
            while group != mount:
                yield group
                group = group.parent
    yield mount


def _lockable(root: Path) -> int | None:
    for line in _text(root / "proc/self/status").splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff" and int(value, 16) >> CAP_IPC_LOCK & 1:
            return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _computes_fp16(root: Path) -> bool:
    for line in _text(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return bool(FP16_FLAGS & set(value.split()))
    return False


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
