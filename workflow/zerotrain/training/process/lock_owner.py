"""Identity of the process that trains in a progress folder: pid, host and Slurm job, if any.

A pid is only meaningful on the same boot of the machine and in the same PID namespace. Containers
may share a host name and neither of these. Slurm reports whether the owner of a job on another
machine is alive; outside of Slurm its lease decides (zerotrain.training.process.lock_file).
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from typing import Annotated, TypedDict

import psutil
from pydantic import Field

from zerotrain.machine import slurm_job
from zerotrain.machine.liveness import Number, Pid, Seconds, boot_id, pid_namespace


@dataclass(frozen=True)
class LockOwner:
    """Process that trains; its start time distinguishes it from a later one with the same pid."""

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
        """Return whether the owner runs; None if neither its pid nor Slurm shows it.

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
        return _same_process(self.pid, self.started) if self._is_here() else None

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


def this_process(lease: float = 0.0) -> LockOwner:
    """Return the owner that describes this process.

    Args:
        lease: Largest number of seconds between two signs of life, if it gives them.
    """
    return LockOwner(
        socket.gethostname(),
        os.getpid(),
        psutil.Process().create_time(),
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


def _same_process(pid: int, started: float) -> bool:
    try:
        process = psutil.Process(pid)
        # Boot time has a resolution of one second, so a start time may shift by one.
        same = abs(process.create_time() - started) < 2
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
