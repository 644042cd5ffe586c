"""Where the time of a step goes."""

from __future__ import annotations

import time
from typing import Any

import torch

PARTS = ("data", "forward", "backward", "optimizer", "validation", "save", "other")
"""What a step is made of. Under ZeRO `backward` has the exchange of gradients in it, and
`optimizer` the gathering of weights."""
MOST_MARKS = 4096
"""Events that wait to be read, at most."""


class StepTime:
    """A stopwatch that is read after each part of a step.

    On a CPU it is the host's clock. A GPU works behind its host, so that each reading is an event
    in the device's queue: what the device does not do while it waits for data or for a save is
    counted there, too. Nothing waits for the device before the times are taken.
    """

    def __init__(self, device: torch.device) -> None:
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._marks: list[tuple[str, Any]] = []
        self._module = None
        if device.type in ("cuda", "npu"):
            self._module = torch.get_device_module(device)
            self._first = self._record()
        self._last = time.perf_counter()

    def lap(self, part: str) -> None:
        """The time since the last reading belongs to this part."""
        if self._module is None:
            now = time.perf_counter()
            self._seconds[part] += now - self._last
            self._last = now
            return
        self._marks.append((part, self._record()))
        if len(self._marks) >= MOST_MARKS:
            self._read()

    def take(self) -> dict[str, float]:
        """Seconds of each part since they were taken before."""
        if self._marks:
            self._read()
        taken, self._seconds = self._seconds, dict.fromkeys(PARTS, 0.0)
        return taken

    def _record(self) -> Any:
        assert self._module is not None
        event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def _read(self) -> None:
        self._marks[-1][1].synchronize()
        for part, event in self._marks:
            self._seconds[part] += self._first.elapsed_time(event) / 1000
            self._first = event
        self._marks = []
