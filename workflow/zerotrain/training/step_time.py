"""Timing of the parts of a step."""

from __future__ import annotations

import time
from typing import Any

import torch

PARTS = ("data", "forward", "backward", "optimizer", "validation", "save", "other")
"""The parts of a step. Under ZeRO `backward` includes the exchange of gradients, and `optimizer`
the gathering of weights."""
MOST_MARKS = 4096
"""Most events that wait to be read."""


class StepTime:
    """A stopwatch that is read after each part of a step.

    On a CPU it uses the host's clock. A GPU runs asynchronously, so each reading is an event in
    the device's queue; a part's time includes the device's idle time while it waits for data or a
    save. The host waits for the device only at `take`, or when MOST_MARKS events are waiting.
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
        """Count the time since the last reading as this part's."""
        if self._module is None:
            now = time.perf_counter()
            self._seconds[part] += now - self._last
            self._last = now
            return
        self._marks.append((part, self._record()))
        if len(self._marks) >= MOST_MARKS:
            self._read()

    def take(self) -> dict[str, float]:
        """Return the seconds of each part since the last call."""
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
