"""The runs of this project's results, and which of them is meant where none is named."""

from __future__ import annotations

import os
from pathlib import Path

from zerotrain.artifact.layout import DATA, LOG, RESULTS, ROLLING, RunFolder, run_of
from zerotrain.config.runs import find_config, is_file_name
from zerotrain.errors import PipelineError
from zerotrain.run.processes import find_processes
from zerotrain.training.process.stop import trainer_of


def runs_at_work() -> list[str]:
    """List the runs that train now; otherwise those that a live Snakemake plans."""
    trains = [
        run for run in runs_here() if any(map(trainer_of, RunFolder(run).path.glob(f"*/{ROLLING}")))
    ]
    if trains:
        return trains
    planned = (one.runs or frozenset() for one in find_processes().snakemakes)
    return sorted(frozenset().union(*planned))


def runs_here() -> list[str]:
    """List the runs that have results."""
    if not RESULTS.is_dir():
        return []
    return sorted(
        path.name
        for path in RESULTS.iterdir()
        if path.is_dir() and path.name != DATA and not path.name.startswith(".")
    )


def phase_folders(run: str) -> list[Path]:
    """List the folders in a run's results that may be those of its phases."""
    return sorted(path for path in RunFolder(run).path.glob("*") if path.is_dir())


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
    if not is_file_name(name) and os.sep not in name and name in runs_here():
        return name, None
    file = find_config(name)
    run = run_of(file)
    if run is None:
        raise PipelineError(
            f"{file}: names no run, or cannot be read",
            hint="name a configuration file that has the key `run`, or a run of results/",
        )
    return run, file


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
