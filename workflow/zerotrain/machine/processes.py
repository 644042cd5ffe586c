"""Processes: their identity (pid, where it is valid, Slurm job), whether they run, and their end.

A pid is only meaningful on the same boot of the machine and in the same PID namespace. Containers
on one machine may share a host name, a disk and a pid; so may containers on several machines. Slurm
reports whether the process of a job on another machine is alive; outside of Slurm a lease decides
(zerotrain.training.process.lock_file).
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypedDict

import psutil
from annotated_types import Ge, Gt, Lt
from pydantic import Field

from zerotrain.machine import slurm_job
from zerotrain.machine.pid_space import boot_id, pid_namespace

Pid = Annotated[int, Gt(0), Lt(2**31)]
"""A process in a record: kill(2) takes 0 and negative numbers for groups of processes."""
Number = Annotated[int, Ge(0), Lt(2**31)]
"""A rank or a count in a record."""
Seconds = Annotated[float, Ge(0), Lt(2**33)]
"""A time that the calendar has, or a duration, in a record."""
START_TOLERANCE = 2.0
"""Seconds by which a start time may shift: that of the boot has a resolution of one second."""


@dataclass(frozen=True)
class ProcessRecord:
    """A process; its start time distinguishes it from a later one with the same pid."""

    host: str
    pid: Pid
    started: Seconds
    """Start of the process, seconds since the epoch."""
    job: str
    """Slurm job id, or empty."""
    restart: Number
    """Number of times that Slurm has requeued the job."""
    cluster: str
    """Slurm's name of the job's cluster."""
    user: Annotated[int, Field(ge=0, lt=2**32)]
    """The user's id: Slurm may hide other users' jobs (PrivateData)."""

    boot: str
    """The kernel's boot id; empty where it has none."""
    pid_namespace: Annotated[int, Field(ge=0)]
    """Inode of the PID namespace in which the pid is valid; 0 if it is unreadable."""
    lease: Seconds
    """Largest number of seconds between two signs of life; 0: it gives none."""

    def is_running(self) -> bool | None:
        """Return whether the process runs; None if neither its pid nor Slurm shows it.

        Slurm starts a job again when it has ended its processes, or when it has lost the node. On a
        node that is lost but runs, the launcher sees that another owner has the lock, and ends.
        """
        me, here = _slurm(), self.is_running_here()
        if self.job and (self.job, self.cluster) == (me["job"], me["cluster"]):
            if self.restart < me["restart"]:
                return False
        elif self.job and here is None:
            own = self.user == os.getuid()
            return slurm_job.runs(self.job, self.cluster, own=own)
        return here

    def is_running_here(self) -> bool | None:
        """Return whether its process runs; None if its pid is meaningless here."""
        return self.state_here() != "" if self._is_here() else None

    def state_here(self) -> str:
        """Return the state of its process, as psutil names it; empty if it has ended."""
        if not self._is_here():
            return ""
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            state = process.status()
            same = abs(process.create_time() - self.started) < START_TOLERANCE
            return state if same and state != psutil.STATUS_ZOMBIE else ""
        return ""

    def runs_command(self, words: Sequence[str]) -> bool:
        """Return whether it runs this user's command that ends with these words, in this folder."""
        with suppress(psutil.Error, OSError):
            process = psutil.Process(self.pid)
            return (
                self.is_running_here() is True
                and process.uids().real == os.getuid()
                and process.cmdline()[-len(words) :] == list(words)
                and Path(process.cwd()) == Path.cwd()
            )
        return False

    def ended_before_boot(self, silent: float) -> bool:
        """Return whether it ended with an earlier boot of this machine.

        Args:
            silent: Seconds since its last sign of life. Another machine of the same name would have
                given one since this machine's boot.
        """
        other = "" not in (self.boot, boot_id()) and self.boot != boot_id()
        return self.host == socket.gethostname() and other and silent > _uptime()

    def _is_here(self) -> bool:
        """Return whether this process sees its pid."""
        return (
            self.host == socket.gethostname()
            and (self.boot == boot_id() or "" in (self.boot, boot_id()))
            and (
                self.pid_namespace == pid_namespace() or 0 in (self.pid_namespace, pid_namespace())
            )
        )

    @property
    def details(self) -> str:
        """The owner's details for a message: its job, its start time, and where it is."""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.started))
        job = f", job {self.job}" if self.job else ""
        twin = self.host == socket.gethostname() and not self._is_here()
        where = ", in another container or on another machine of this name" if twin else ""
        return f"{job}, since {since}{where}"


def this_process(lease: float = 0.0) -> ProcessRecord:
    """Return the record of this process.

    Args:
        lease: Largest number of seconds between two signs of life, if it gives them.
    """
    return record_of(os.getpid(), lease)


def record_of(pid: int, lease: float = 0.0) -> ProcessRecord:
    """Return the record of a running process of this user, here and in this job.

    Args:
        pid: The process.
        lease: As of this_process.

    Raises:
        psutil.NoSuchProcess: it has ended, and has been waited for.
    """
    return ProcessRecord(
        socket.gethostname(),
        pid,
        psutil.Process(pid).create_time(),
        **_slurm(),
        user=os.getuid(),
        boot=boot_id(),
        pid_namespace=pid_namespace(),
        lease=lease,
    )


def _uptime() -> float:
    """Return the seconds since this machine's boot, including sleep."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.time() - psutil.boot_time() if clock is None else time.clock_gettime(clock)


class _Slurm(TypedDict):
    job: str
    restart: int
    cluster: str


def _slurm() -> _Slurm:
    """Return our Slurm job, if any, its number of requeues, and the cluster's name."""
    job, count = os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_RESTART_COUNT", "")
    if job and not count.isdecimal():
        slurm = slurm_job.this_job()
        count = str(slurm.restarts) if slurm else ""
    return {
        "job": job,
        "restart": int(count) if count.isdecimal() else 0,
        "cluster": os.environ.get("SLURM_CLUSTER_NAME", ""),
    }


KILL_SECONDS = 30.0
"""How long killed processes are waited for."""


@dataclass(frozen=True)
class Found:
    """A process of this machine, as the table had it."""

    pid: int
    started: float
    """Seconds since the epoch."""
    words: tuple[str, ...]
    """Its command line."""

    def is_running(self) -> bool:
        """Return whether it still runs; another process may have its pid."""
        with suppress(psutil.Error):
            process = psutil.Process(self.pid)
            same = process.create_time() == self.started
            return same and process.status() != psutil.STATUS_ZOMBIE
        return False


def find_processes(folder: str) -> Iterator[Found]:
    """Yield the processes whose working directory is a folder, of those that this user may see."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.cwd() == folder:
                yield _find(process)


def find_parents(pid: int) -> Iterator[Found]:
    """Yield the processes above a process, the nearest first."""
    with suppress(psutil.Error):
        for process in psutil.Process(pid).parents():
            yield _find(process)


def _find(process: psutil.Process) -> Found:
    return Found(process.pid, process.create_time(), tuple(process.cmdline()))


def is_snakemake(words: Sequence[str]) -> bool:
    """Return whether a command line is Snakemake's, called as a program, a script or a module."""
    if not words or not re.fullmatch(r"python[\d.]*", Path(words[0]).name):
        return bool(words) and Path(words[0]).name == "snakemake"
    rest = iter(words[1:])
    for word in rest:
        if word in ("-W", "-X"):
            next(rest, None)
        elif word == "-m":
            return next(rest, None) == "snakemake"
        elif word == "-c" or not word.startswith("-"):
            return Path(word).name == "snakemake"
    return False


def cpu_seconds(pid: int) -> float:
    """Return the processor time that a process has used; 0 if it has ended."""
    with suppress(psutil.Error):
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
    return 0.0


def started_before(pid: int, age: float) -> bool:
    """Return whether a process runs and is older than `age` seconds."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        old = time.time() - process.create_time() >= age
        return old and process.status() != psutil.STATUS_ZOMBIE
    return False


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a child process that runs, with all that it started, and wait for their end."""
    if process.poll() is not None:
        return
    found = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    for one in found:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()
    psutil.wait_procs(found, timeout=KILL_SECONDS)
