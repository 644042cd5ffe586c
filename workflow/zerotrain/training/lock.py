"""One writer per progress folder: a lock file that names its holder.

Two locks stand behind each other. The first names its holder, the small process that starts a
training; a dead holder's is taken over. The second is the kernel's, held by the process that writes
checkpoints, and ends with it: it covers the moment in which a killed holder's training still ends.

Whether a holder on another machine lives, Slurm knows of its job. The launchers of a training on
several machines look at the lock: where it is not their starter's any more, they end.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import os
import signal
import socket
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TypedDict

import psutil

from zerotrain.errors import PipelineError

LOCK = "lock"
TAKING = "lock.taking"
WRITER = "lock.writer"
JOB = "zerotrain.cluster.job"
"""Imported by its name: what asks Slurm changes no trained number."""
LOOK_SECONDS = 1.0
"""How often a launcher looks whether its starter still holds the lock."""
GRACE_SECONDS = 15.0
"""How long the training of a dead holder may take to notice that it is alone, and end."""


@dataclass(frozen=True)
class Holder:
    """Who trains: a process, told from a later one of the same pid by its start time."""

    host: str
    pid: int
    started: float
    """Start of the process, seconds since the epoch."""
    job: str
    """Slurm job id, or empty."""
    restart: int = 0
    """How often Slurm has requeued the job."""
    cluster: str = ""
    """Slurm's name of the cluster whose job it is."""

    def lives(self) -> bool:
        """Whether the holder runs. Of another host only Slurm knows; else it counts as alive.

        Slurm has ended all processes of a job before it starts the job anew, on whatever host.
        """
        me = _slurm()
        if self.job and (self.job, self.cluster) == (me["job"], me["cluster"]):
            if self.restart < me["restart"]:
                return False
        elif self.job and self.host != socket.gethostname():
            return importlib.import_module(JOB).runs(self.job, self.cluster) is not False
        return self.runs_here() is not False

    def runs_here(self) -> bool | None:
        """Whether its process runs, where it is of this host; None of another one."""
        if self.host != socket.gethostname():
            return None
        return _same_process(self.pid, self.started)


def this_process() -> Holder:
    """The process that asks."""
    return Holder(
        socket.gethostname(),
        os.getpid(),
        psutil.Process().create_time(),
        **_slurm(),
    )


class Lock:
    """A held lock. Use `take`, then `release`."""

    def __init__(self, folder: Path, holder: Holder) -> None:
        self._path = folder / LOCK
        self._holder = holder
        _HELD.append(self)

    def release(self) -> None:
        """Give the lock back, unless somebody removed it and another took it since."""
        if holder_of(self._path.parent) == self._holder:
            self._path.unlink(missing_ok=True)
        if self in _HELD:
            _HELD.remove(self)


_HELD: list[Lock] = []


def release_all() -> None:
    """Give back what this process holds, where it ends without unwinding its stack."""
    for lock in list(_HELD):
        with contextlib.suppress(OSError):
            lock.release()


def take(folder: Path) -> Lock:
    """Take the lock of a progress folder.

    Raises:
        PipelineError: another process holds it; the message names host, pid and since when.
    """
    folder.mkdir(parents=True, exist_ok=True)
    me = this_process()
    # A new file each time: an old one of this name may be the lock itself under its first name.
    draft = folder / f"{LOCK}.new-{me.host}-{me.pid}"
    draft.unlink(missing_ok=True)
    draft.write_text(json.dumps(asdict(me)))
    try:
        # Takers go one by one, else a second could clear away what the first has just taken over.
        with (folder / TAKING).open("w") as turn:
            with contextlib.suppress(OSError):  # a file system without this lock
                fcntl.flock(turn, fcntl.LOCK_EX)
            while True:
                _clear_if_dead(folder)
                try:
                    # A hard link appears with its content and fails where one exists: no moment
                    # between the two.
                    os.link(draft, folder / LOCK)
                except FileExistsError:
                    continue
                except OSError:  # a file system without hard links
                    draft.replace(folder / LOCK)
                return Lock(folder, me)
    finally:
        draft.unlink(missing_ok=True)


def holder_of(folder: Path) -> Holder | None:
    """Who holds the lock of a progress folder, alive or not; None if nobody does."""
    try:
        return Holder(**json.loads((folder / LOCK).read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        return None  # a lock appears whole: what is not came out of a power cut


def _clear_if_dead(folder: Path) -> None:
    refuse_held(folder)
    (folder / LOCK).unlink(missing_ok=True)


def refuse_held(folder: Path) -> None:
    """Refuse a progress folder in which a training runs.

    Raises:
        PipelineError: the message names its process and job, and how to stop it.
    """
    holder = holder_of(folder)
    if holder is None or not holder.lives():
        return
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.started))
    job = f", job {holder.job}" if holder.job else ""
    end_it = f" or `scancel {holder.job}`" if holder.job else ""
    raise PipelineError(
        f"{folder}: a training is running here already: pid {holder.pid} on {holder.host}"
        f"{job}, since {since}",
        hint=f"wait for it, or stop it with `touch {folder}/stop`{end_it}; if that host is gone "
        f"for good, remove {folder}/{LOCK}",
    )


def end_with_holder(folder: Path) -> None:
    """End this process group once the lock is not what it is now, or its holder of this host ends.

    For launchers on the machines of a job, whose starter is on one of them: a signal that nobody
    can answer ends it alone, and what srun has started may go on.
    """
    first = holder_of(folder)

    def gone() -> bool:
        try:
            now = holder_of(folder)
        except OSError:  # a shared folder that does not answer now
            return False
        return now != first or (now is not None and now.runs_here() is False)

    def watch() -> None:
        times = 0
        while times < 2:  # a network's file system may miss a file for a moment
            time.sleep(LOOK_SECONDS)
            times = times + 1 if gone() else 0
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="lock", daemon=True).start()


def hold_writer(folder: Path) -> IO[str]:
    """Take the kernel's lock of the writing process; it lasts while the returned file is open.

    Raises:
        PipelineError: the writer of an earlier start does not end.
    """
    stream = (folder / WRITER).open("w")
    deadline = time.monotonic() + GRACE_SECONDS
    while True:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return stream
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                stream.close()
                raise PipelineError(
                    f"{folder}: a training process of an earlier start still runs",
                    hint=f"find it with `fuser {folder / WRITER}`, end it, and start again",
                ) from error
            time.sleep(0.1)
        except OSError:
            return stream  # a file system without this lock: the first one has to do


class _Slurm(TypedDict):
    job: str
    restart: int
    cluster: str


def _slurm() -> _Slurm:
    """Our Slurm job, if any, how often it has been requeued, and the cluster's name."""
    job, count = os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_RESTART_COUNT", "")
    if job and not count.isdecimal():
        found = importlib.import_module(JOB).this_job()
        count = str(found.restarts) if found else ""
    return {
        "job": job,
        "restart": int(count) if count.isdecimal() else 0,
        "cluster": os.environ.get("SLURM_CLUSTER_NAME", ""),
    }


def _same_process(pid: int, started: float) -> bool:
    try:
        process = psutil.Process(pid)
        # Boot time is read in whole seconds, so a start time may move by one.
        same = abs(process.create_time() - started) < 2
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
