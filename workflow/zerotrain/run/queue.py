"""The jobs that Slurm has of this folder: waiting or running, by the rule that submitted them."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

QUEUE_SECONDS = 10.0
FORMAT = "%i|%T|%r|%Z|%k"
"""Id, state, reason, working directory, comment."""
PENDING = "PENDING"


@dataclass(frozen=True)
class SubmittedJob:
    """A job of one rule."""

    id: str
    state: str
    """As Slurm names it: PENDING, RUNNING, COMPLETING, ..."""
    reason: str
    """Why it waits, such as Priority or Resources; None if it does not."""
    rule: str
    wildcards: str
    """Their values, joined by `_`: the phase, or run and phase if several runs are planned."""

    @property
    def waits(self) -> bool:
        """Return whether it has not started."""
        return self.state == PENDING


def jobs_here(folder: Path) -> list[SubmittedJob]:
    """List this user's jobs whose working directory is a folder; empty without Slurm."""
    if shutil.which("squeue") is None:
        return []
    try:
        done = subprocess.run(
            ["squeue", "--me", "-h", "-o", FORMAT],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=QUEUE_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return parse_jobs(done.stdout, folder)


def parse_jobs(text: str, folder: Path) -> list[SubmittedJob]:
    """Parse lines of FORMAT. The executor's comment is rule_NAME or rule_NAME_wildcards_VALUES."""
    jobs = []
    for line in text.splitlines():
        fields = line.split("|", 4)
        if len(fields) < 5 or not fields[4].startswith("rule_"):
            continue
        number, state, reason, place, comment = fields
        if os.path.realpath(place) == os.path.realpath(folder):
            rule, _, wildcards = comment.removeprefix("rule_").partition("_wildcards_")
            jobs.append(SubmittedJob(number, state, reason, rule, wildcards))
    return jobs
