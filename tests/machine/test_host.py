"""Memory and cores are those that this process may use, whatever the machine has."""

from __future__ import annotations

import resource
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from zerotrain.machine import host
from zerotrain.machine.host import detect_host

GIB = 2**30


@pytest.fixture(autouse=True)
def big(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 64 GiB, 50 of them free, and 16 cores."""
    found = SimpleNamespace(total=64 * GIB, available=50 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: found)
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda _: set(range(16)))


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


def test_without_control_groups_the_machine_counts(tmp_path: Path) -> None:
    """As on a desktop."""
    found = detect_host(tmp_path)
    assert (found.memory, found.available, found.limit) == (64 * GIB, 50 * GIB, None)
    assert (found.cores, found.quota) == (16, None)


def test_the_smallest_limit_above_us_counts_in_version_2(tmp_path: Path) -> None:
    """The job's group is unlimited, the user's is not; pages of files count as free."""
    group = "sys/fs/cgroup/slurm/job"
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/slurm/job",
            f"{group}/memory.max": "max",
            f"{group}/memory.current": str(9 * GIB),
            f"{group}/memory.stat": "anon 0",
            f"{group}/cpu.max": "max 100000",
            "sys/fs/cgroup/slurm/memory.max": str(32 * GIB),
            "sys/fs/cgroup/slurm/memory.current": str(10 * GIB),
            "sys/fs/cgroup/slurm/memory.stat": f"anon 0\ninactive_file {4 * GIB}",
            "sys/fs/cgroup/slurm/cpu.max": "250000 100000",
        },
    )
    found = detect_host(tmp_path)
    assert (found.memory, found.limit) == (32 * GIB, 32 * GIB)
    assert found.available == (32 - 10 + 4) * GIB
    assert found.quota == 2.5


def test_a_containers_own_group_is_its_root_in_version_1(tmp_path: Path) -> None:
    """/proc names a path of the host, which is not mounted inside."""
    write(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n0::/",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(8 * GIB),
            "sys/fs/cgroup/memory/memory.usage_in_bytes": str(3 * GIB),
            "sys/fs/cgroup/memory/memory.stat": f"cache 5\ntotal_inactive_file {GIB}",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "400000",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        },
    )
    found = detect_host(tmp_path)
    assert (found.memory, found.available, found.quota) == (8 * GIB, 6 * GIB, 4.0)


def test_no_limit_of_version_1_is_none(tmp_path: Path) -> None:
    """It is written as a number that no machine has, and -1 for time."""
    write(
        tmp_path,
        {
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "1",
            "sys/fs/cgroup/memory/memory.stat": "",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        },
    )
    found = detect_host(tmp_path)
    assert (found.limit, found.quota) == (None, None)


@pytest.mark.parametrize(
    ("capabilities", "limit", "lockable"),
    [("0", 8 << 20, 8 << 20), ("4000", 8 << 20, None), ("0", resource.RLIM_INFINITY, None)],
)
def test_locked_memory_has_a_limit_unless_the_capability_is_there(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capabilities: str,
    limit: int,
    lockable: int | None,
) -> None:
    """CAP_IPC_LOCK is bit 14."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    write(tmp_path, {"proc/self/status": f"Name:\tx\nCapEff:\t{capabilities}"})
    assert detect_host(tmp_path).lockable == lockable


@pytest.mark.parametrize(("flag", "fp16"), [("avx512_fp16", True), ("avx512_bf16", False)])
def test_fp16_is_read_from_the_processors_flags(tmp_path: Path, flag: str, fp16: bool) -> None:
    """Of the first core."""
    write(tmp_path, {"proc/cpuinfo": f"model\t: 1\nflags\t\t: fpu {flag} sse"})
    assert detect_host(tmp_path).fp16 is fp16


def test_fp16_is_what_torch_says_of_this_machine() -> None:
    """The flags stand for the question that DeepSpeed asks of torch."""
    import torch

    assert detect_host().fp16 is torch.ops.mkldnn._is_mkldnn_fp16_supported()
