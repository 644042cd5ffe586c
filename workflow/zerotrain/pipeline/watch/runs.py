"""The runs of this project's results, and which of them is meant where none is named; the
Snakemakes that work on them now."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import psutil

from zerotrain.artifact.layout import DATA, LOG, RESULTS, ROLLING, RunFolder, run_of
from zerotrain.config.command_options import MAIN_CONFIG
from zerotrain.config.runs import find_config, is_file_name, read_runs
from zerotrain.errors import PipelineError
from zerotrain.pipeline import snakemake_runs
from zerotrain.training.process.stop import trainer_of


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
    """Finds the Snakemakes of this project; what one plans is read once for each process."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, float], frozenset[str] | None] = {}

    def read(self) -> list[LiveSnakemake]:
        """List the live ones that have recorded themselves."""
        return [
            self._live(one.host, one.pid, one.started, here=bool(one.is_running_here()))
            for one in (run.process for run in snakemake_runs.read_runs() if run.is_live())
        ]

    def read_starting(self) -> list[LiveSnakemake]:
        """List those that run here; it takes longer, and finds those that recorded nothing yet."""
        found = _find_starting(os.getcwd(), int(time.monotonic()))
        return [
            self._live("", pid, started, here=True)
            for pid, started in found
            if psutil.pid_exists(pid)
        ]

    def _live(self, host: str, pid: int, started: float, *, here: bool) -> LiveSnakemake:
        key = host, pid, started
        if key not in self._known:
            self._known[key] = _planned(pid) if here else None
        return LiveSnakemake(started, self._known[key])


@lru_cache(maxsize=1)
def _find_starting(folder: str, second: int) -> list[tuple[int, float]]:
    """Find this machine's Snakemakes of a folder: pid and start; at most once a second.

    A Snakemake records itself when it has read the Snakefile, several seconds after its start on a
    busy machine.
    """
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            words = process.cmdline()
            called = "snakemake" in (Path(word).name for word in words[1:3])
            if called and not snakemake_runs.is_dry_run(words) and process.cwd() == folder:
                found.append((process.pid, process.create_time()))
    return found


def _planned(pid: int) -> frozenset[str] | None:
    """Return the runs that a Snakemake of this machine plans; None if that cannot be read."""
    try:
        process = psutil.Process(pid)
        words, folder = process.cmdline(), Path(process.cwd())
    except (psutil.Error, OSError):
        return None
    file = folder / (_config_file(words) or MAIN_CONFIG)
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


def runs_at_work() -> list[str]:
    """List the runs that train now; otherwise those that a live Snakemake plans."""
    trains = [run for run in runs_here() if any(map(trainer_of, _progress_folders(run)))]
    if trains:
        return trains
    reader = SnakemakeReader()
    live = [*reader.read(), *reader.read_starting()]
    return sorted(frozenset().union(*(one.runs or frozenset() for one in live)))


def runs_here() -> list[str]:
    """List the runs that have results."""
    if not RESULTS.is_dir():
        return []
    return sorted(
        path.name
        for path in RESULTS.iterdir()
        if path.is_dir() and path.name != DATA and not path.name.startswith(".")
    )


def choose_runs() -> list[str]:
    """Return the runs at work; without any, the one that changed last.

    Raises:
        PipelineError: there is no run.
    """
    if found := runs_at_work():
        return found
    runs = runs_here()
    if not runs:
        raise PipelineError(
            f"no run has results in {RESULTS.absolute()}",
            hint="call it in the project's folder; name a run of config/ to wait for it, or start "
            "one with `make train`",
        )
    return [max(runs, key=_changed)]


def run_named(name: str) -> tuple[str, Path | None]:
    """Return a run by its name or its configuration file, with that file if it is known.

    Raises:
        PipelineError: neither a configuration nor results have the name.
    """
    if not is_file_name(name) and _is_run(name):
        return name, None
    file = find_config(name)
    run = run_of(file)
    if run is None:
        raise PipelineError(
            f"{file}: names no run, or cannot be read",
            hint="name a configuration file that has the key `run`, or a run of results/",
        )
    return run, file


def _is_run(name: str) -> bool:
    return os.sep not in name and name in runs_here()


def _progress_folders(run: str) -> Iterator[Path]:
    return RunFolder(run).path.glob(f"*/{ROLLING}")


def _changed(run: str) -> float:
    """Return the time at which a run last logged something, or a stage of it began or ended."""
    folder = RunFolder(run).path
    places = (
        folder,
        *folder.glob(f"*/{ROLLING}/{LOG}"),
        *folder.glob("*/"),
        *folder.glob("logs/*"),
    )
    times = []
    for place in places:
        try:
            times.append(place.stat().st_mtime)
        except OSError:
            continue
    return max(times, default=0.0)
