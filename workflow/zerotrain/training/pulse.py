"""What each training process is doing, told every second in a file: who hangs, and where.

A collective that waits names nobody. So a thread of each process looks at its main thread's Python
frames and writes down the step, the place, and since when nothing has moved; a process that was
stopped, or that holds the interpreter, writes no more. The loop knows nothing of it. A thread that
writes a checkpoint counts as well: the main thread waits for it in one place.

    ranks/00001.json   {"rank", "host", "pid", "started", "step", "at", "waits", "still", "time"}
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import ClassVar, Protocol

import psutil

RANKS = "ranks"
BEAT_SECONDS = 1.0
SILENT_SECONDS = 5.0
"""A process whose last beat is older has stopped beating; a busy machine is late by one or two."""
LATE_SECONDS = 15.0
"""By so much the last beat of one that hung is older; those that waited end within a few."""
WORKERS = ("checkpoint",)
"""Threads that the main thread waits for: where one of them moves, the process does."""
PACKAGE = f"{os.sep}zerotrain{os.sep}"
COLLECTIVES = (
    f"torch{os.sep}distributed{os.sep}",
    f"deepspeed{os.sep}comm{os.sep}",
    f"torch{os.sep}autograd{os.sep}graph.py",
)
"""Where a process is that waits for others; DDP exchanges gradients within backward."""


HELD = {
    psutil.STATUS_STOPPED: "was stopped by a signal",
    psutil.STATUS_TRACING_STOP: "is held by a debugger",
    psutil.STATUS_DISK_SLEEP: "waits for a disk or a network file system",
}


class Stepping(Protocol):
    """What counts the steps: the loop's clock."""

    step: int


@dataclass(frozen=True)
class Beat:
    """What one process said last."""

    rank: int
    host: str
    pid: int
    started: float
    """Start of the process, seconds since the epoch: tells it from a later one of its pid."""
    step: int | None
    """The step that it computes, from 1; None before the first."""
    at: str
    """The innermost place in our code: file, line and function."""
    waits: bool
    """Whether it is inside an exchange with the others."""
    still: float
    """Seconds for which neither its main thread nor one that it waits for had moved."""
    time: float
    """When this was written, seconds since the epoch."""

    def silent(self, now: float) -> float:
        """Seconds without a beat."""
        return now - self.time

    def runs(self) -> bool:
        """Whether the process is there, stopped or not. Of another host nothing is known."""
        if self.host != socket.gethostname():
            return True
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.started) < 2
            return same and process.status() != psutil.STATUS_ZOMBIE
        return False

    def last_seen(self, newest: float) -> str:
        """Who it was and what it did, in words, before all ended; newest: the last beat of all."""
        who, where = self._who_and_where()
        if self.silent(newest) >= LATE_SECONDS:
            return f"{who} was last seen {self.silent(newest):.0f} s before the others {where}"
        return f"{who} {'waited for the others' if self.waits else 'did not move'} {where}"

    def describe(self, now: float) -> str:
        """Who it is and what it does, in words."""
        who, where = self._who_and_where()
        if not self.runs():
            return f"{who} has ended; it was {where}"
        state = self._state()
        if state not in HELD and self.silent(now) < SILENT_SECONDS:
            doing = "waits for the others" if self.waits else "does not move"
            return f"{who} {doing} {where}, for {self.still + self.silent(now):.0f} s"
        doing = HELD.get(state, "does not answer")
        return f"{who} {doing}, last seen {self.silent(now):.0f} s ago {where}"

    def _who_and_where(self) -> tuple[str, str]:
        step = f" of step {self.step}" if self.step else " before the first step"
        return f"rank {self.rank} (pid {self.pid} on {self.host})", f"in {self.at}{step}"

    def _state(self) -> str:
        if self.host == socket.gethostname():
            with contextlib.suppress(psutil.Error):
                return psutil.Process(self.pid).status()
        return ""


class Pulse:
    """Tells of this process until it is closed."""

    moves: ClassVar[int] = 0
    """Raised by what waits in one place for something outside, and sees it go on."""

    def __init__(self, progress: Path, rank: int) -> None:
        self.clock: Stepping | None = None
        self._path = progress / RANKS / f"{rank:05d}.json"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._rank = rank
        self._started = psutil.Process().create_time()
        self._main = threading.main_thread().ident
        self._place: tuple[object, ...] = ()
        self._still = 0.0
        self._seen = time.monotonic()
        self._closed = threading.Event()
        self._beat()
        threading.Thread(target=self._run, name="pulse", daemon=True).start()

    def close(self) -> None:
        """This process has nothing more to wait for."""
        self._closed.set()
        self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        while not self._closed.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError):  # a full disk is the checkpoint's to tell
                self._beat()

    def _beat(self) -> None:
        current = sys._current_frames()
        stack = list(_stack(current.get(self._main or 0)))
        workers = [one.ident for one in threading.enumerate() if one.name in WORKERS]
        moving = [*stack, *(frame for one in workers for frame in _stack(current.get(one or 0)))]
        step = self.clock.step + 1 if self.clock else None
        place = (step, self.moves, *((id(frame.f_code), frame.f_lasti) for frame in moving))
        now = time.monotonic()
        # A job that was suspended for hours has not hung for hours.
        self._still += min(now - self._seen, 2 * BEAT_SECONDS)
        self._seen = now
        if place != self._place:
            self._place, self._still = place, 0.0
        files = [frame.f_code.co_filename for frame in stack]
        beat = Beat(
            self._rank,
            socket.gethostname(),
            os.getpid(),
            self._started,
            step,
            next((_place(frame) for frame in stack if _ours(frame)), "its start"),
            any(part in file for file in files for part in COLLECTIVES),
            self._still,
            time.time(),
        )
        draft = self._path.with_suffix(".new")
        draft.write_text(json.dumps(asdict(beat)))
        if not self._closed.is_set():
            draft.replace(self._path)


def beats(progress: Path) -> list[Beat]:
    """What the processes of a training said last, by rank."""
    found = []
    for path in sorted((progress / RANKS).glob("*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError):
            found.append(Beat(**json.loads(path.read_text())))
    return found


def behind(found: Sequence[Beat], now: float) -> list[Beat]:
    """Those that the others wait for: gone or silent, else at an earlier step, else not waiting."""
    if silent := [one for one in found if not one.runs() or one.silent(now) >= SILENT_SECONDS]:
        return silent
    return _behind_in_place(found)


def _behind_in_place(found: Sequence[Beat]) -> list[Beat]:
    least = min((one.step or 0 for one in found), default=0)
    if any((one.step or 0) > least for one in found):
        return [one for one in found if (one.step or 0) == least]
    return [one for one in found if not one.waits] or list(found)


def who_hangs(progress: Path, now: float, but: int = 0) -> str:
    """The processes that the others wait for, in words, without the one that asks.

    Empty where nobody has said a thing.
    """
    found = [one for one in beats(progress) if one.pid != but]
    return "; ".join(one.describe(now) for one in behind(found, now))


def who_hung(progress: Path) -> str:
    """The processes that the others waited for, in words, after all have ended.

    Empty where nobody has said a thing.
    """
    found = beats(progress)
    newest = max((one.time for one in found), default=0.0)
    late = [one for one in found if one.silent(newest) >= LATE_SECONDS]
    return "; ".join(one.last_seen(newest) for one in late or _behind_in_place(found))


def clear(progress: Path) -> None:
    """Forget what the processes of an earlier start have said."""
    shutil.rmtree(progress / RANKS, ignore_errors=True)


def end_all(progress: Path, but: int = 0) -> None:
    """End the processes of this host, all but one: a stopped one does not see that it is alone."""
    for one in beats(progress):
        if one.host == socket.gethostname() and one.pid != but and one.runs():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(one.pid, signal.SIGKILL)


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    """A thread's frames, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _ours(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return PACKAGE in file and file != __file__


def _place(frame: FrameType) -> str:
    file = frame.f_code.co_filename.rpartition(PACKAGE)[2]
    return f"{file}:{frame.f_lineno} ({frame.f_code.co_name})"
