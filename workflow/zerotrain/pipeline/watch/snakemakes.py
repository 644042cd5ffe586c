"""The Snakemakes that work in this project now, and the runs that each plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from zerotrain.config.runs import read_runs
from zerotrain.errors import PipelineError
from zerotrain.pipeline import snakemake_runs
from zerotrain.pipeline.snakemake import DEFAULT_CONFIG


@dataclass(frozen=True)
class LiveSnakemake:
    """A Snakemake that runs."""

    started: float
    """Seconds since the epoch."""
    runs: frozenset[str] | None
    """The runs that it plans; None: not known, as on another host."""

    def may_plan(self, run: str) -> bool:
        """Return whether it plans a run, as far as is known."""
        return self.runs is None or run in self.runs


class SnakemakeReader:
    """Reads the records of Snakemakes; a command line is read once for each process."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, float], frozenset[str] | None] = {}

    def read(self) -> list[LiveSnakemake]:
        """List the live ones."""
        found = []
        for one in snakemake_runs.read_runs():
            if not one.is_live():
                continue
            process = one.process
            key = process.host, process.pid, process.started
            if key not in self._known:
                self._known[key] = _planned(process.pid) if process.is_running_here() else None
            found.append(LiveSnakemake(process.started, self._known[key]))
        return found


def _planned(pid: int) -> frozenset[str] | None:
    """Return the runs that a Snakemake of this machine plans; None if that cannot be read."""
    try:
        process = psutil.Process(pid)
        words, folder = process.cmdline(), Path(process.cwd())
    except (psutil.Error, OSError):
        return None
    file = folder / (_config_file(words) or DEFAULT_CONFIG)
    try:
        return frozenset(run.run for run in read_runs(file).values())
    except (PipelineError, OSError):
        return None


def _config_file(words: Sequence[str]) -> str | None:
    """Return the first value of --configfile in a command line."""
    for place, word in enumerate(words):
        option, _, value = word.partition("=")
        if option in ("--configfile", "--configfiles"):
            return value or next(iter(words[place + 1 : place + 2]), None)
    return None
