"""A process that dies or hangs is named, with its place, in bounded time; no process waits for
ever."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from tests.training.endings import beat

from zerotrain.training.checkpointing import rank_writer
from zerotrain.training.process import ending, watch
from zerotrain.training.process.failures import EXIT_FAULT
from zerotrain.training.process.watch import Watch
from zerotrain.training.reporting import heartbeat, samples
from zerotrain.training.reporting.heartbeat import Heartbeat, late_ranks, read_statuses

LONG = 5000
"""Steps that no test waits for."""


@pytest.fixture
def started(training: Any) -> Iterator[Any]:
    """Starts the processes of a phase, and ends what a failed test leaves."""
    running: list[Any] = []

    def start(name: str, preset: str = "torch", processes: int = 1, **changes: Any) -> Any:
        training.phase(name, preset, LONG, num_processes=processes, **changes)
        running.extend(training.start_ranks(name, processes))
        training.wait_for_step(name, 3, *running)
        return running

    yield start
    for process in running:
        if process.is_alive():
            process.kill()
        process.join(10)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["torch", pytest.param("zero2", marks=pytest.mark.soak)])
def test_a_stopped_process_of_two_is_named(training: Any, started: Any, preset: str) -> None:
    """The other's wait ends at launch.ddp_timeout; it says where it was stopped, and ends it."""
    first, second = started("stopped", preset, 2, ddp_timeout=5)
    while not all(one.step for one in read_statuses(training.progress("stopped"))):
        time.sleep(0.1)
    os.kill(second.pid, signal.SIGSTOP)
    for process in (first, second):
        process.join(60)
    assert first.exitcode is not None
    assert second.exitcode == -signal.SIGKILL
    left = ending.read_exit_record(training.progress("stopped"))
    assert left is not None
    assert left.code == EXIT_FAULT
    said = training.output.read_text()
    assert "ERROR: phase stopped: a process did not come to where the others wait for it" in said
    assert re.search(
        rf"; rank 1 \(pid {second.pid} on \S+\) was stopped by a signal, last seen \d+ s ago in "
        r"[\w/]+\.py:\d+ \([\w<>]+\) of step \d+\n",
        said,
    ), said.splitlines()[-20:]
    assert "launch.ddp_timeout" in said


@pytest.mark.slow
def test_a_single_process_that_hangs_is_found_from_outside(training: Any, started: Any) -> None:
    """It can tell no one itself: the watch names the place and ends it."""
    (process,) = started("alone")
    progress = training.progress("alone")
    with Watch(progress, "alone", 3.0):
        training.wait_for_step("alone", 20, process)  # one that moves is left alone
        os.kill(process.pid, signal.SIGSTOP)
        process.join(30)
    assert process.exitcode == -signal.SIGKILL
    left = ending.read_exit_record(progress)
    assert left is not None
    assert left.code == EXIT_FAULT
    assert re.match(r"phase alone: nothing has moved for \d+ s: rank 0 \(pid ", left.reason)
    assert "was stopped by a signal, last seen" in left.reason
    assert "launch.ddp_timeout" in left.hint


class Moments:
    """A clock that a test moves; a pulse beats when it is asked to."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.told: Heartbeat | None = None
        self.seen: list[float] = []

    def pass_by(self, seconds: float) -> None:
        """Let time pass and a beat come; what it says of standing still is noted."""
        self.now += seconds
        assert self.told
        self.told._beat()
        (beat,) = read_statuses(self.told._path.parents[1])
        self.seen.append(beat.still)


@pytest.fixture
def moments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Moments]:
    """The clock of a process that has started to beat."""
    found = Moments()
    clock = SimpleNamespace(monotonic=lambda: found.now, time=lambda: found.now)
    monkeypatch.setattr(heartbeat, "time", clock)
    monkeypatch.setattr(watch, "time", clock)
    monkeypatch.setattr(Heartbeat, "_run", lambda self: None)
    found.told = Heartbeat(tmp_path, 0)
    yield found
    found.told.close()


def test_a_hang_inside_the_process_is_found(tmp_path: Path, moments: Moments) -> None:
    """A main thread that waits in one place counts as still although its process beats."""
    assert moments.told
    moments.told.counter = SimpleNamespace(step=6)  # type: ignore[assignment]
    for _ in range(4):
        moments.pass_by(1.0)
    (beat,) = read_statuses(tmp_path)
    moments.told.close()
    assert moments.seen == [0.0, 1.0, 2.0, 3.0]
    assert (beat.step, beat.still, beat.waits) == (7, 3.0, False)
    assert read_statuses(tmp_path) == []


def test_a_hang_in_one_place_is_ended(
    tmp_path: Path, moments: Moments, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that beats and does not move, as one whose GPU or loader hangs."""
    ended = []
    monkeypatch.setattr(heartbeat, "end_all", ended.append)
    assert moments.told
    moments.told.counter = SimpleNamespace(step=6)  # type: ignore[assignment]

    def wait(seconds: float) -> bool:
        moments.pass_by(seconds)
        return len(moments.seen) == 9

    watching = Watch(tmp_path, "main", 2.0)
    watching._closed = SimpleNamespace(wait=wait)  # type: ignore[assignment]
    watching._run()
    assert moments.seen[-3:] == [0.0, 1.0, 2.0]
    assert ended == [tmp_path]
    left = ending.read_exit_record(tmp_path)
    assert left is not None
    assert re.search(
        r"rank 0 \(pid \d+ on \S+\) does not move in .* of step 7, for 2 s$", left.reason
    )


def test_nothing_hangs_while_one_process_moves(tmp_path: Path) -> None:
    """One that computes long lets the others wait long."""
    watch = Watch(tmp_path, "main", 2.0)
    for second in range(20):
        found = [beat(0, waits=True), replace(beat(1), still=0.0, time=1000.0 + second)]
        assert watch._stalled_seconds(found, 1.0) == 0.0
    assert watch._stalled_seconds(found, 1.0) == 1.0
    assert watch._stalled_seconds(found, 1.0) == 2.0


def test_a_busy_process_is_not_still(moments: Moments) -> None:
    """Whatever runs through Python moves: a save, a compilation, a long first step."""
    for _ in range(4):
        moments.pass_by(1.0)
        json.dumps(list(range(10)))
        moments.pass_by(1.0)
    assert moments.seen == [0.0] * 8


def test_a_process_that_waits_for_its_checkpoint_is_not_still(
    tmp_path: Path, moments: Moments, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The main thread waits in one place for the thread that writes, however long that takes."""

    def slowly(*_: Any) -> dict[str, str]:
        for number in range(24):  # at one place half of the time, as a writer is
            if number % 8 < 4:
                moments.pass_by(0.25)
            else:
                moments.pass_by(0.25)
        return {}

    monkeypatch.setattr(rank_writer, "write_rank_files", slowly)
    rank_writer.RankWriter(tmp_path, 0, []).result()
    assert len(moments.seen) == 24
    assert max(moments.seen) <= 0.75


@pytest.mark.parametrize(("a_look", "still"), [(0.1, [0.0] * 5), (0.0, [0.0, 1.0, 2.0, 3.0, 4.0])])
def test_a_process_that_waits_for_images_is_still_where_they_are(
    moments: Moments, monkeypatch: pytest.MonkeyPatch, a_look: float, still: list[float]
) -> None:
    """It waits for another one: while that computes, nothing hangs; where that hangs, it does."""
    used = [0.0]

    def cpu_seconds(pid: int) -> float:
        used.append(used[-1] + a_look)
        return used[-1]

    monkeypatch.setattr(samples, "cpu_seconds", cpu_seconds)
    monkeypatch.setattr(samples, "time", SimpleNamespace(sleep=lambda _: moments.pass_by(1.0)))
    child: Any = SimpleNamespace(pid=1, poll=lambda: 0 if len(moments.seen) == 5 else None)
    assert object.__new__(samples.LatentSampler)._wait_for_decoding(child) == 0
    assert moments.seen == still


def test_who_is_behind() -> None:
    """A silent one before one at an earlier step, before one that does not wait, before all."""
    waiting, other = beat(0, waits=True), beat(1, waits=True)
    assert late_ranks([waiting, beat(1, ago=30)], 1000.0)[0].rank == 1
    assert [one.rank for one in late_ranks([beat(0, step=5), other], 1000.0)] == [1]
    assert [one.rank for one in late_ranks([waiting, beat(1)], 1000.0)] == [1]
    assert [one.rank for one in late_ranks([waiting, other], 1000.0)] == [0, 1]
    gone = replace(waiting, process=replace(waiting.process, pid=2**22 - 3))
    assert late_ranks([other, gone], 1000.0) == [gone]


def test_a_process_says_what_it_waits_for() -> None:
    """In words of people."""
    assert (
        beat(0, waits=True)
        .describe(1000.0)
        .endswith("waits for the others in x of step 4, for 9 s")
    )
    assert "does not move in x before the first step" in beat(1, step=None).describe(1000.0)
    assert "does not answer, last seen 30 s ago in x" in beat(1, ago=30).describe(1000.0)


def test_only_processes_of_this_training_are_ended(tmp_path: Path) -> None:
    """Not a later one that has got the pid of one that ended."""
    told = Heartbeat(tmp_path, 0)
    told.close()
    later = replace(beat(0).process, pid=os.getppid(), started=1.0)
    (tmp_path / heartbeat.RANKS / "00000.json").write_text(
        json.dumps(asdict(replace(beat(0), process=later)))
    )
    heartbeat.end_all(tmp_path)
    assert psutil.pid_exists(os.getppid())
