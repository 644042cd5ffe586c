"""Who trains in a progress folder: a process, on a host, in a job of Slurm or in none.

Whether a holder on another machine lives, Slurm knows of its job.
"""

from __future__ import annotations

import importlib
import os
import socket
import time
from dataclasses import dataclass
from typing import TypedDict

import psutil

JOB = "zerotrain.cluster.job"
"""Imported by its name: what asks Slurm changes no trained number."""


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
    user: int | None = None
    """The user's number: of other users' jobs Slurm may deny that they exist (PrivateData)."""

    def lives(self) -> bool:
        """Whether the holder runs. Of another host only Slurm knows; else it counts as alive.

        Slurm starts a job anew when it has ended its processes, or when it has lost the node. On a
        node that is lost but runs, the launcher sees that the lock is another's, and ends.
        """
        me = _slurm()
        if self.job and (self.job, self.cluster) == (me["job"], me["cluster"]):
            if self.restart < me["restart"]:
                return False
        elif self.job and self.host != socket.gethostname():
            own = self.user in (None, os.getuid())
            return importlib.import_module(JOB).runs(self.job, self.cluster, own=own) is not False
        return self.runs_here() is not False

    def runs_here(self) -> bool | None:
        """Whether its process runs, where it is of this host; None of another one."""
        if self.host != socket.gethostname():
            return None
        return _same_process(self.pid, self.started)

    @property
    def details(self) -> str:
        """The rest of a sentence that names it: its job, and since when it runs."""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.started))
        job = f", job {self.job}" if self.job else ""
        return f"{job}, since {since}"


def this_process() -> Holder:
    """The process that asks."""
    return Holder(
        socket.gethostname(),
        os.getpid(),
        psutil.Process().create_time(),
        **_slurm(),
        user=os.getuid(),
    )


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
