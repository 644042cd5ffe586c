"""What the live page of a run shows: its state, read from files, and its pictures by number."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from zerotrain.artifact.layout import CONFIGS, RunFolder, run_of
from zerotrain.builder.writing import NAME
from zerotrain.errors import PipelineError
from zerotrain.pipeline.watch.runs import runs_here
from zerotrain.pipeline.watch.state import RunReader, RunState

PICTURES = ("*/progress/samples/step-*.png", "*/evaluation/grid.png")
"""Samples while a phase trains, and the grid of each exported phase."""
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
    """One reader of state for each run; each request reads only what is new since the last."""

    def __init__(self) -> None:
        self._readers: dict[tuple[str, Path | None], RunReader] = {}
        self._turn = threading.Lock()

    def read(self, run: str) -> RunState:
        """Return the present state of a known run."""
        file = known_runs()[run]
        with self._turn:
            reader = self._readers.setdefault((run, file), RunReader(run, file))
            return reader.read()


def known_runs() -> dict[str, Path | None]:
    """Return the runs of this project with their configuration files, by name.

    A name that is not a run's counts as none: it would lead out of results/.
    """
    found: dict[str, Path | None] = dict.fromkeys(runs_here())
    for file in sorted(CONFIGS.glob("*.yaml")):
        try:
            about = file.stat()
        except OSError:  # removed meanwhile
            continue
        run = _run_of(file, (about.st_ino, about.st_size, about.st_mtime_ns))
        if run is not None and found.get(run) is None:
            found[run] = file
    return {run: found[run] for run in sorted(found) if NAME.fullmatch(run)}


@lru_cache(maxsize=1024)
def _run_of(file: Path, stamp: tuple[int, int, int]) -> str | None:
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
    for file in [file for pattern in PICTURES for file in folder.glob(pattern)]:
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
