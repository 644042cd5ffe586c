"""Signals to a training's processes: one request however often they arrive, and a second one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from zerotrain.machine.child_process import SAME_SECONDS, STOP_SIGNALS
from zerotrain.training.process import lock
from zerotrain.training.process.stop import StopRequest


class EndedError(Exception):
    """Stands for the end of the process."""


@pytest.fixture(autouse=True)
def _unheard(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Signals reach no process after a test, and end no test."""

    def end(code: int) -> None:
        raise EndedError(code)

    monkeypatch.setattr(os, "_exit", end)
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, former in before.items():
        signal.signal(number, former)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_is_a_request(tmp_path: Path, number: signal.Signals) -> None:
    """As is the file."""
    stop = StopRequest(tmp_path)
    assert not stop()
    os.kill(os.getpid(), number)
    assert stop()
    assert not (tmp_path / "stop").exists()
    other = StopRequest(tmp_path / "other")
    assert not other()
    (tmp_path / "stop").touch()
    assert StopRequest(tmp_path)()


def test_what_a_launcher_hands_on_is_the_same_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once the same signal may come from the cluster and from torchrun; later it is a second
    one, which ends the process with the code of the signal, and gives its lock back."""
    stop = StopRequest(tmp_path, tell=True)
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop()
    assert (tmp_path / "stop").exists()
    lock.take(tmp_path)
    later = time.monotonic() + SAME_SECONDS + 0.1
    monkeypatch.setattr(time, "monotonic", lambda: later)
    with pytest.raises(EndedError, match=str(128 + signal.SIGTERM)):
        os.kill(os.getpid(), signal.SIGTERM)
    assert lock.read_owner(tmp_path) is None


@pytest.mark.parametrize(("number", "heard"), [(signal.SIGINT, False), (signal.SIGUSR1, True)])
def test_what_is_ignored_stays_ignored(tmp_path: Path, number: int, heard: bool) -> None:
    """As under nohup, or of a shell's background job; but for the warning that LSF and Grid Engine
    send to all processes of a job, whose shell is to live on."""
    signal.signal(number, signal.SIG_IGN)
    stop = StopRequest(tmp_path)
    os.kill(os.getpid(), number)
    assert stop() == heard
