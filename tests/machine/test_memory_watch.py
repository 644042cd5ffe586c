"""Memory of a piece of work: before, at its end, at its peak."""

from __future__ import annotations

import mmap
import sys

import pytest

from zerotrain.machine import memory_watch
from zerotrain.machine.memory_watch import (
    MemoryUse,
    MemoryWatch,
    memory_lines,
    memory_metrics,
    over_processes,
)

MIB = 2**20


def filled(size: int) -> mmap.mmap:
    """Resident memory of its own, each page written; the heap of a large process has free pages
    that are resident already. `close` gives it back."""
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for _ in range(size // MIB):
        pages.write(b"x" * MIB)
    return pages


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a part of a process is Linux's")
def test_a_peak_between_begin_and_end_is_seen() -> None:
    """64 MiB that were taken and given back are in the peak and not in the end, nothing looked on
    meanwhile; 40 MiB that are kept are in the end."""
    watch = MemoryWatch()
    filled(64 * MIB).close()
    kept = filled(40 * MIB)
    use = watch.use()["host"]
    assert 60 * MIB < use.peak - use.begin < 80 * MIB
    assert 38 * MIB < use.end - use.begin < 48 * MIB
    kept.close()


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a part of a process is Linux's")
def test_what_was_used_before_is_in_the_processes_peak_alone() -> None:
    """A watch that begins later does not see it; the peak of the process's life keeps it."""
    earlier = filled(96 * MIB)
    at_its_most = memory_watch.peak_host_bytes()
    earlier.close()
    watch = MemoryWatch()
    assert watch.use()["host"].peak < at_its_most - 80 * MIB
    assert watch.peaks()[0] > at_its_most - MIB  # the kernel counts a thread's pages in batches


def test_of_several_processes_the_fullest_device_and_the_hosts_sum() -> None:
    """One GPU that is full stops all; processes of a machine share its memory."""
    first = {"device": MemoryUse(10, 20, 50), "host": MemoryUse(100, 110, 150)}
    second = {"device": MemoryUse(30, 30, 40), "host": MemoryUse(200, 190, 260)}
    both = over_processes([first, second])
    assert both == {"device": MemoryUse(10, 20, 50), "host": MemoryUse(300, 300, 410)}
    assert memory_metrics(both, "train") == {
        "train_device_begin_bytes": 10,
        "train_device_end_minus_begin_bytes": 10,
        "train_device_peak_minus_begin_bytes": 40,
        "train_device_total_peak_bytes": 50,
        "train_host_begin_bytes": 300,
        "train_host_end_minus_begin_bytes": 0,
        "train_host_peak_minus_begin_bytes": 110,
        "train_host_total_peak_bytes": 410,
    }


def test_the_lines_say_what_was_used() -> None:
    """A kind of memory that is not there has no line."""
    uses = {
        "device": MemoryUse(0, 0, 0),
        "host": MemoryUse(1536 * MIB, 1520 * MIB, 2048 * MIB),
    }
    assert list(memory_lines(uses, "training")) == [
        "host memory of training: 1.5 GiB before, -16.0 MiB at the end, +512.0 MiB at its peak, "
        "2.0 GiB in all"
    ]
