"""The time of a step belongs to its parts, on a host's clock and by a device's events."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from zerotrain.training import step_time
from zerotrain.training.step_time import PARTS, StepTime

SPANS = [("data", 0.5), ("forward", 2.0), ("backward", 4.0), ("data", 0.25), ("optimizer", 1.0)]
EXPECTED = {"data": 0.75, "forward": 2.0, "backward": 4.0, "optimizer": 1.0}


def test_each_span_belongs_to_the_part_that_ends_it(monkeypatch) -> None:
    """Spans of one part add up; taken once, they begin again from nothing."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    stopwatch = StepTime(torch.device("cpu"))
    for part, seconds in SPANS:
        now[0] += seconds
        stopwatch.lap(part)
    assert stopwatch.take() == dict.fromkeys(PARTS, 0.0) | EXPECTED
    assert stopwatch.take() == dict.fromkeys(PARTS, 0.0)
    now[0] += 3.0
    stopwatch.lap("save")
    assert stopwatch.take()["save"] == 3.0


class Device:
    """A device that does its work later than it is called."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waits = 0

    def Event(self, enable_timing: bool) -> SimpleNamespace:  # noqa: N802
        event = SimpleNamespace(at=0.0)
        event.record = lambda: setattr(event, "at", self.now)
        event.elapsed_time = lambda other: (other.at - event.at) * 1000
        event.synchronize = lambda: setattr(self, "waits", self.waits + 1)
        return event


def test_a_device_is_read_by_its_events_and_waited_for_only_when_asked(monkeypatch) -> None:
    """The same spans in the device's own time; one wait for as many steps as a line of the log
    has, or as events may wait to be read."""
    device = Device()
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    stopwatch = StepTime(torch.device("cuda"))
    for _ in range(2):
        for part, seconds in SPANS:
            device.now += seconds
            stopwatch.lap(part)
    assert device.waits == 0
    assert stopwatch.take() == dict.fromkeys(PARTS, 0.0) | {k: 2 * v for k, v in EXPECTED.items()}
    assert device.waits == 1
    assert stopwatch.take() == dict.fromkeys(PARTS, 0.0)
    monkeypatch.setattr(step_time, "MOST_MARKS", 3)
    for _ in range(7):
        device.now += 1.0
        stopwatch.lap("forward")
    assert device.waits == 3
    assert stopwatch.take()["forward"] == 7.0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_parts_add_up_to_the_time_that_passed() -> None:
    """Work that is only queued is counted where it is done."""
    device = torch.device("cuda")
    big = torch.ones(4096, 4096, device=device)
    torch.cuda.synchronize()
    stopwatch, began = StepTime(device), time.perf_counter()
    for _ in range(20):
        big @ big
    stopwatch.lap("forward")
    time.sleep(0.2)
    stopwatch.lap("data")
    taken = stopwatch.take()
    whole = time.perf_counter() - began
    assert taken["forward"] + taken["data"] == pytest.approx(whole, rel=0.1)
