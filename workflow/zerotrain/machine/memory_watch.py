"""Device and host memory of a piece of work: before, after, and peak.

For the device it is memory of tensors (allocated); the memory that the allocator has reserved is in
`peak_device_bytes`. For the host it is resident memory, including mapped files that the system can
reclaim; its peak is counted by the kernel, so no sampling is needed.
"""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from zerotrain.machine.device import device_type, peak_device_bytes
from zerotrain.machine.host import gib

STATUS = Path("/proc/self/status")
RESET = Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""proc(5): reset the peak of resident memory to the current value."""


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of one kind of memory around a piece of work."""

    begin: int
    end: int
    peak: int

    def metrics(self, prefix: str) -> dict[str, int]:
        """Return the four numbers under their names in metrics.json."""
        return {
            f"{prefix}_begin_bytes": self.begin,
            f"{prefix}_end_minus_begin_bytes": self.end - self.begin,
            f"{prefix}_peak_minus_begin_bytes": self.peak - self.begin,
            f"{prefix}_total_peak_bytes": self.peak,
        }


class MemoryWatch:
    """A measurement of this process's memory from its creation."""

    def __init__(self) -> None:
        self._host_before, self._device_before = peak_host_bytes(), peak_device_bytes()
        with contextlib.suppress(OSError):  # otherwise the peak is over the process's whole life
            RESET.write_text(RESET_PEAK, encoding="utf-8")
        kind = device_type()
        self._device = None
        if kind in ("cuda", "npu"):
            import torch

            self._device = torch.get_device_module(kind)
            self._device.reset_peak_memory_stats()
        self._begin = memory_now()

    def use(self) -> dict[str, MemoryUse]:
        """Return the use of `device` and `host` so far."""
        end = memory_now()
        peaks = {
            "device": int(self._device.max_memory_allocated()) if self._device else 0,
            "host": peak_host_bytes(),
        }
        return {
            kind: MemoryUse(begin, end[kind], max(begin, end[kind], peaks[kind]))
            for kind, begin in self._begin.items()
        }

    def peaks(self) -> tuple[int, int]:
        """Return the peak resident bytes of the host and reserved bytes of the device so far."""
        return (
            max(self._host_before, peak_host_bytes()),
            max(self._device_before, peak_device_bytes()),
        )


def memory_now() -> dict[str, int]:
    """Return bytes in use: resident on the `host`, and held by tensors on the `device`."""
    kind, device = device_type(), 0
    if kind in ("cuda", "npu"):
        import torch

        device = int(torch.get_device_module(kind).memory_allocated())
    return {"device": device, "host": int(psutil.Process().memory_info().rss)}


def peak_host_bytes() -> int:
    """Return the peak resident memory of this process."""
    if STATUS.is_file():
        for line in STATUS.read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    # Linux gives kilobytes, including the process's memory before exec.
    found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found if sys.platform == "darwin" else found * 1024


def over_processes(uses: Sequence[Mapping[str, MemoryUse]]) -> dict[str, MemoryUse]:
    """Combine the uses of several processes: the fullest device, and the sum over hosts.

    The processes may peak at different times, and shared memory is resident in each: the sum is an
    upper bound.
    """
    host = [use["host"] for use in uses]
    return {
        "device": max((use["device"] for use in uses), key=lambda use: use.peak),
        "host": MemoryUse(
            sum(use.begin for use in host),
            sum(use.end for use in host),
            sum(use.peak for use in host),
        ),
    }


def memory_metrics(uses: Mapping[str, MemoryUse], work: str) -> dict[str, int]:
    """Return all numbers by their names in metrics.json: `train_host_begin_bytes` and so on."""
    return {
        name: value
        for kind in ("device", "host")
        for name, value in uses[kind].metrics(f"{work}_{kind}").items()
    }


def memory_lines(uses: Mapping[str, MemoryUse], what: str) -> Iterator[str]:
    """Yield a line for each kind of memory that the work has used."""
    for kind in ("device", "host"):
        use = uses[kind]
        if use.peak:
            yield (
                f"{kind} memory of {what}: {gib(use.begin)} before, {_change(use.end - use.begin)} "
                f"at the end, {_change(use.peak - use.begin)} at its peak, {gib(use.peak)} in all"
            )


def _change(count: int) -> str:
    return f"{'-' if count < 0 else '+'}{gib(abs(count))}"
