"""Slurm's description of a job, from scontrol.

Within a job the environment has little: Snakemake's jobstep removes all SLURM_* variables,
including the count of restarts and the nodes, except for the job's id and a few more.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass

ANSWER_SECONDS = 30.0
"""Timeout for a busy controller; scontrol itself waits 10 seconds per attempt."""
HOLDS_NODES = frozenset(
    {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT"}
)
"""States in which processes of a job may exist (slurm.schedmd.com/squeue.html, job states)."""


@dataclass(frozen=True)
class Job:
    """The current description of a job."""

    id: str
    state: str
    restarts: int
    """How often it has been requeued; all processes of an earlier start have ended."""
    nodes: int
    node_list: str
    """In Slurm's short form, such as n[1-2]."""

    @property
    def holds_nodes(self) -> bool:
        """Return whether its processes may be running."""
        return self.state in HOLDS_NODES


def this_job() -> Job | None:
    """Return the job of this process; None outside of a job, or if Slurm does not answer."""
    own = os.environ.get("SLURM_JOB_ID", "")
    return ask(own)[0] if own else None


def ask(job: str) -> tuple[Job | None, bool]:
    """Return a job, and whether Slurm answered: it forgets jobs that ended long ago."""
    done = call("scontrol", "show", "job", "-o", job)
    if done is None:
        return None, False
    if done.returncode:
        return None, "Invalid job id" in done.stderr
    values = dict(re.findall(r"(?:^|\s)(\w+)=(\S*)", done.stdout.partition("\n")[0]))
    if "JobState" not in values:
        return None, False
    count = re.match(r"\d+", values.get("NumNodes", ""))
    found = Job(
        id=values.get("JobId", job),
        state=values.get("JobState", ""),
        restarts=int(values.get("Restarts", "0")),
        nodes=int(count[0]) if count else 1,
        node_list=values.get("NodeList", ""),
    )
    return found, True


def runs(job: str, cluster: str, *, own: bool = True) -> bool | None:
    """Return whether processes of a job may be running; None if unknown.

    Args:
        job: Its id.
        cluster: The name of its cluster, or empty: ids of other clusters are meaningless here.
        own: Whether the job is this user's: Slurm may hide other users' running jobs.
    """
    here = os.environ.get("SLURM_CLUSTER_NAME") or _value("config", "ClusterName")
    if not here or (cluster and cluster != here):
        return None
    found, answered = ask(job)
    if not answered or (found is None and not own):
        return None
    return found is not None and found.holds_nodes


def address_of_first(job: Job) -> str:
    """Return the address of a job's first node, as used by Slurm."""
    done = call("scontrol", "show", "hostnames", job.node_list)
    names = done.stdout.split() if done and not done.returncode else []
    first = names[0] if names else job.node_list
    return _value("node", "NodeAddr", first) or first


def _value(what: str, key: str, *names: str) -> str:
    done = call("scontrol", "show", what, *names, *(("-o",) if names else ()))
    text = done.stdout if done and not done.returncode else ""
    found = re.search(rf"\b{key}\s*=\s*(\S+)", text)
    return found[1] if found else ""


def call(*command: str, seconds: float = ANSWER_SECONDS) -> subprocess.CompletedProcess[str] | None:
    """Run a command of Slurm; None where it is not installed, or does not answer in time."""
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=seconds,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
