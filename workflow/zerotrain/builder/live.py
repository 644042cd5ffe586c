"""What the live page of a run shows: its state, read from files, and its pictures by number."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from zerotrain.artifact.layout import CONFIGS, RunFolder, run_of
from zerotrain.builder.writing import NAME
from zerotrain.errors import PipelineError
from zerotrain.run.plan import stamp_of
from zerotrain.run.runs import phase_folders, runs_here
from zerotrain.run.view import RunView
from zerotrain.run.watch.state import RunState, read_state

MOST_SHOWN = 12


@dataclass(frozen=True)
class Picture:
    """A picture of a run.

    Attributes:
        number: Its place by age, by which the page asks for it: the oldest is 0.
        phase: The phase that made it.
        title: What it shows.
        version: Changes with the file, so that no browser shows an older one.
    """

    number: int
    phase: str
    title: str
    version: int
    file: Path


class RunReaders:
    """One view of each run; each request reads only what is new since the last."""

    def __init__(self) -> None:
        self._views: dict[tuple[str, Path | None], RunView] = {}
        self._turn = threading.Lock()

    def read(self, run: str) -> RunState:
        """Return the present state of a known run."""
        file = known_runs()[run]
        with self._turn:
            if (run, file) not in self._views:
                self._views[run, file] = RunView(run, file)
            return read_state(self._views[run, file])


def known_runs() -> dict[str, Path | None]:
    """Return the runs of this project with their configuration files, by name.

    A name that is not a run's counts as none: it would lead out of results/.
    """
    found: dict[str, Path | None] = dict.fromkeys(runs_here())
    for file in sorted(CONFIGS.glob("*.yaml")):
        run = _run_of(file, stamp_of(file))
        if run is not None and found.get(run) is None:
            found[run] = file
    return {run: found[run] for run in sorted(found) if NAME.fullmatch(run)}


@lru_cache(maxsize=1024)
def _run_of(file: Path, stamp: object) -> str | None:
    """Read a file's run once for each version of it: pages ask every two seconds."""
    return run_of(file)


def check_run(run: str) -> str:
    """Check that a run of this name exists.

    Raises:
        PipelineError: it does not.
    """
    known = known_runs()
    if run not in known:
        raise PipelineError(
            f"there is no run {run[:100]!r} in this project",
            hint=f"runs here: {', '.join(known) or 'none yet'}",
        )
    return run


def find_pictures(run: str) -> list[Picture]:
    """List the pictures of a run, the oldest first; what links out of its folder is left out."""
    folder = RunFolder(run).path
    inside = folder.resolve()
    found = []
    phases = RunView(run, folders=phase_folders(run)).phases
    for file in [file for phase in phases for file in phase.pictures]:
        try:
            if file.resolve().is_relative_to(inside) and file.is_file():
                found.append((file.stat().st_mtime_ns, file))
        except OSError:  # removed meanwhile
            continue
    return [
        Picture(number, file.relative_to(folder).parts[0], _title(file), version, file)
        for number, (version, file) in enumerate(sorted(found))
    ]


def _title(file: Path) -> str:
    number = file.stem.removeprefix("step-")
    return (
        f"samples of step {int(number):,}" if number.isdecimal() else "grid of the exported weights"
    )
