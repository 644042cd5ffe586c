"""The processes of this machine that work in this folder (Snakemakes, and the stages they run), and
the jobs that Slurm has of it: waiting or running, by the rule that submitted them."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from zerotrain.config import MAIN_CONFIG
from zerotrain.config.runs import read_runs
from zerotrain.errors import PipelineError
from zerotrain.machine import processes
from zerotrain.machine.slurm_job import call

DRY_RUN = re.compile(r"--dry-?run|-[Ffkpt]*n[Ffkpqt]*")
LOG_OPTION = "--log"
"""With its value and a stage, the first words of each rule's `zerotrain`."""


@dataclass(frozen=True)
class Snakemake:
    """A Snakemake that plans or runs jobs."""

    pid: int
    started: float
    """Seconds since the epoch."""
    runs: frozenset[str] | None
    """The runs that it plans; None: its configuration cannot be read."""

    def may_plan(self, run: str) -> bool:
        """Return whether it plans a run, as far as is known."""
        return self.runs is None or run in self.runs


@dataclass(frozen=True)
class Processes:
    """Those of a folder; of a cluster's other machines Slurm's queue and locks tell."""

    snakemakes: tuple[Snakemake, ...]
    logs: frozenset[Path]
    """The logs of the stages that run, relative to the folder."""

    def start_for(self, run: str) -> float | None:
        """Return when the first Snakemake that may work on a run started; None without any."""
        starts = [one.started for one in self.snakemakes if one.may_plan(run)]
        return min(starts, default=None)


def find_processes() -> Processes:
    """Find those of the working directory; the machine is looked through once a second."""
    return _find(os.getcwd(), int(time.monotonic()))


@lru_cache(maxsize=1)
def _find(folder: str, second: int) -> Processes:
    snakemakes: list[Snakemake] = []
    logs: set[Path] = set()
    for one in processes.find_processes(folder):
        if log := _log_of_stage(one.words):
            logs.add(log)
        elif processes.is_snakemake(one.words) and not any(map(DRY_RUN.fullmatch, one.words)):
            runs = _planned(one.pid, one.started, _config_file(one.words))
            snakemakes.append(Snakemake(one.pid, one.started, runs))
    return Processes(tuple(snakemakes), frozenset(logs))


def _log_of_stage(words: Sequence[str]) -> Path | None:
    """Return the log of a stage that Snakemake started: python zerotrain --log FILE STAGE ..."""
    place = next((place for place, word in enumerate(words[:5]) if word == LOG_OPTION), None)
    if place is None or place + 2 >= len(words):
        return None
    return Path(os.path.normpath(words[place + 1]))


@lru_cache(maxsize=64)
def _planned(pid: int, started: float, file: Path) -> frozenset[str] | None:
    """Return the runs of a Snakemake's configuration, read once for each process."""
    try:
        return frozenset(run.run for run in read_runs(file).values())
    except (PipelineError, OSError):
        return None


def _config_file(words: Sequence[str]) -> Path:
    """Return the first value of --configfile in a command line, else the main configuration."""
    for place, word in enumerate(words):
        option, _, value = word.partition("=")
        if option in ("--configfile", "--configfiles"):
            return Path(value or next(iter(words[place + 1 : place + 2]), MAIN_CONFIG))
    return Path(MAIN_CONFIG)


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
    done = call("squeue", "--me", "-h", "-o", FORMAT, seconds=QUEUE_SECONDS)
    return parse_jobs(done.stdout, folder) if done else []


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
