"""Heartbeat: each process writes its location to a file every second; it shows who hangs, where."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate, chain, islice, repeat, takewhile
from operator import attrgetter, is_not, itemgetter
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import psutil
from pydantic import Field

from zerotrain.artifact.documents import read_record
from zerotrain.machine.processes import Number, ProcessRecord, Seconds, this_process
from zerotrain.machine.regular_file import make_folder, write_text
from zerotrain.state.position import StepCounter

RANKS = "ranks"
BEAT_SECONDS = 1.0
SILENT_SECONDS = 5.0
"""Age from which a last beat counts as silence; a busy machine delays beats by 1 or 2 s."""
LATE_SECONDS = 15.0
"""Least lag of a hung process's last beat; processes that waited for it end within seconds."""
WORKERS = ("checkpoint",)
"""Threads that the main thread waits for: if one of them moves, the process moves."""
PACKAGE = f"{os.sep}zerotrain{os.sep}"
COLLECTIVES = (
    f"torch{os.sep}distributed{os.sep}",
    f"deepspeed{os.sep}comm{os.sep}",
    f"torch{os.sep}autograd{os.sep}graph.py",
)
"""Code in which a process waits for others; DDP exchanges gradients within backward."""


HELD = {
    psutil.STATUS_STOPPED: "was stopped by a signal",
    psutil.STATUS_TRACING_STOP: "is held by a debugger",
    psutil.STATUS_DISK_SLEEP: "waits for a disk or a network file system",
}


class CodeLocation(NamedTuple):
    """What a frame of a thread executes."""

    file: str
    line: int
    function: str
    instruction: int

    def is_ours(self) -> bool:
        return PACKAGE in self.file and self.file != __file__

    def __str__(self) -> str:
        return f"{self.file.rpartition(PACKAGE)[2]}:{self.line} ({self.function})"


@dataclass(frozen=True)
class RankStatus:
    """Last report of one process."""

    rank: Number
    process: ProcessRecord
    step: Annotated[int, Field(ge=0, lt=2**62)] | None
    """The step that it computes, from 1; None before the first."""
    at: str
    """The innermost place in our code: file, line and function."""
    waits: bool
    """Whether it is in a collective with the others."""
    still: Seconds
    """Seconds since its main thread, or a thread that this one waits for, last moved."""
    time: Seconds
    """Time of this report, seconds since the epoch."""

    def silent_seconds(self, now: float) -> float:
        """Return the seconds since this report."""
        return now - self.time

    def is_running(self) -> bool:
        """Return whether the process exists, stopped or not; True for one of another machine."""
        return self.process.is_running_here() is not False

    def describe_last_seen(self, newest: float) -> str:
        """Describe the process and its last activity after the end; newest: the last report."""
        who, where = self._format_rank_and_place()
        if self.silent_seconds(newest) >= LATE_SECONDS:
            return (
                f"{who} was last seen {self.silent_seconds(newest):.0f} s before the others {where}"
            )
        return f"{who} {'waited for the others' if self.waits else 'did not move'} {where}"

    def describe(self, now: float) -> str:
        """Describe the process and its activity."""
        who, where = self._format_rank_and_place()
        if not self.is_running():
            return f"{who} has ended; it was {where}"
        state = self.process.state_here()
        if state not in HELD and self.silent_seconds(now) < SILENT_SECONDS:
            doing = "waits for the others" if self.waits else "does not move"
            return f"{who} {doing} {where}, for {self.still + self.silent_seconds(now):.0f} s"
        doing = HELD.get(state, "does not answer")
        return f"{who} {doing}, last seen {self.silent_seconds(now):.0f} s ago {where}"

    def _format_rank_and_place(self) -> tuple[str, str]:
        step = f" of step {self.step}" if self.step else " before the first step"
        where = f"pid {self.process.pid} on {self.process.host}"
        return f"rank {self.rank} ({where})", f"in {self.at}{step}"


class Heartbeat:
    """Heartbeat thread of this process, until it is closed."""

    moves: ClassVar[int] = 0
    """Counter of external progress: code that waits in one place increments it."""

    def __init__(self, progress: Path, rank: int) -> None:
        self.counter: StepCounter | None = None
        self._path = progress / RANKS / f"{rank:05d}.json"
        make_folder(self._path.parent)
        self._rank = rank
        self._process = this_process()
        self._main = threading.main_thread().ident
        self._place: tuple[object, ...] = ()
        self._still = 0.0
        self._seen = time.monotonic()
        self._closed = threading.Event()
        self._beat()
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def close(self) -> None:
        """End the heartbeat: this process waits for no other one."""
        self._closed.set()
        self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        while not self._closed.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError):  # the checkpoint reports a full disk
                self._beat()

    def _beat(self) -> None:
        stack = _read_stack(self._main or 0)
        workers = [one.ident for one in threading.enumerate() if one.name in WORKERS]
        step = self.counter.step + 1 if self.counter else None
        moving = [location for one in workers for location in _read_stack(one or 0)]
        place = (step, self.moves, *stack, *moving)
        now = time.monotonic()
        # The hours in which a job was suspended do not count.
        self._still += min(now - self._seen, 2 * BEAT_SECONDS)
        self._seen = now
        if place != self._place:
            self._place, self._still = place, 0.0
        status = RankStatus(
            self._rank,
            self._process,
            step,
            next((str(one) for one in stack if one.is_ours()), "its start"),
            any(part in one.file for one in stack for part in COLLECTIVES),
            self._still,
            time.time(),
        )
        draft = self._path.with_suffix(".new")
        write_text(draft, json.dumps(asdict(status)))
        if not self._closed.is_set():
            draft.replace(self._path)


def read_statuses(progress: Path) -> list[RankStatus]:
    """Return the last reports of a training's processes, by rank.

    A file that is no report, or is being replaced, is left out.
    """
    statuses = []
    for path in sorted((progress / RANKS).glob("*.json")):
        with contextlib.suppress(OSError, ValueError):
            statuses.append(read_record(path, RankStatus))
    return statuses


def late_ranks(statuses: Sequence[RankStatus], now: float) -> list[RankStatus]:
    """Return the processes that others wait for: gone or silent, or behind, or not waiting."""
    if silent := [
        one for one in statuses if not one.is_running() or one.silent_seconds(now) >= SILENT_SECONDS
    ]:
        return silent
    return _find_least_advanced(statuses)


def _find_least_advanced(statuses: Sequence[RankStatus]) -> list[RankStatus]:
    least = min((one.step or 0 for one in statuses), default=0)
    if any((one.step or 0) > least for one in statuses):
        return [one for one in statuses if (one.step or 0) == least]
    return [one for one in statuses if not one.waits] or list(statuses)


def describe_hang(progress: Path, now: float, but: int = 0) -> str:
    """Describe the processes that the others wait for, without the calling one.

    Empty if no process has reported.
    """
    statuses = [one for one in read_statuses(progress) if one.process.pid != but]
    return "; ".join(one.describe(now) for one in late_ranks(statuses, now))


def describe_past_hang(progress: Path) -> str:
    """Describe the processes that the others waited for, after all have ended.

    Empty if no process has reported.
    """
    statuses = read_statuses(progress)
    newest = max((one.time for one in statuses), default=0.0)
    late = [one for one in statuses if one.silent_seconds(newest) >= LATE_SECONDS]
    return "; ".join(
        one.describe_last_seen(newest) for one in late or _find_least_advanced(statuses)
    )


def clear(progress: Path) -> None:
    """Remove the reports of an earlier start."""
    shutil.rmtree(progress / RANKS, ignore_errors=True)


def end_all(progress: Path, but: int = 0) -> None:
    """Kill the processes of this host except for one: a stopped one does not see the end."""
    for one in read_statuses(progress):
        if one.process.pid != but and one.process.is_running_here():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(one.process.pid, signal.SIGKILL)


def _read_stack(thread: int) -> list[CodeLocation]:
    """Return what a thread executes, the innermost frame first; nothing if it has ended.

    A frame keeps its function's local variables alive. DeepSpeed looks at the autograd nodes of
    partitioned parameters; one that outlives that function breaks the next recomputed block. One
    `list` over C functions leaves the thread no moment to run on while its frames are held.
    """
    first: Iterator[Any] = islice(map(itemgetter(thread), iter(sys._current_frames, None)), 1)
    frames = takewhile(partial(is_not, None), accumulate(chain(first, repeat("f_back")), getattr))
    read = attrgetter("f_code.co_filename", "f_lineno", "f_code.co_name", "f_lasti")
    with contextlib.suppress(KeyError):
        return list(map(CodeLocation._make, list(map(read, frames))))
    return []
