"""The runs of this project's results, what a word of a command line names of them, and the newest
weights of a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from zerotrain import artifact
from zerotrain.artifact.layout import DATA, LOG, RESULTS, ROLLING, RunFolder, run_of
from zerotrain.config.runs import find_config
from zerotrain.config.suggestions import after_question
from zerotrain.errors import PipelineError
from zerotrain.export.options import ExportOptions
from zerotrain.machine.child_process import handling_signals, unwind
from zerotrain.run.processes import find_processes
from zerotrain.run.view import RunView
from zerotrain.training.checkpointing.conditions import read_conditions
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


@dataclass(frozen=True)
class Place:
    """A run, or a place in its results, as a word of a command line names it."""

    run: str
    parts: tuple[str, ...] = ()
    """Of the path below the run's folder: its phase, and what of it."""
    file: Path | None = None
    """The configuration, if the run was named by it."""
    root: Path = RESULTS
    """The folder of results, which may be another project's."""

    @property
    def is_here(self) -> bool:
        """Return whether it is of this project."""
        return self.root == RESULTS

    @property
    def folder(self) -> Path:
        """Return its folder, which need not be there."""
        return self.root.joinpath(self.run, *self.parts)


def is_config(word: str | Path) -> bool:
    """Return whether a word names a configuration: of a run, or of several under `runs`."""
    path = Path(word)
    below = path.parts[:1] == RESULTS.parts
    return path.suffix in (".yaml", ".yml") and not below and not path.is_dir()


def find_place(word: str | Path) -> Place | None:
    """Return what a word names: RUN, its configuration, RUN/PHASE, or a path below results/.

    Returns:
        The run or place, whether it is there or not; None if no run can have such a name.

    Raises:
        PipelineError: there is no such configuration, or it names no run.
    """
    if is_config(word):
        file = find_config(str(word))
        run = run_of(file)
        if run is None:
            raise PipelineError(
                f"{file}: names no run, or cannot be read",
                hint="name a configuration file that has the key `run`, or a run of results/",
            )
        return Place(run, file=file)
    parts = Path(os.path.normpath(word)).parts
    above = [place for place, part in enumerate(parts) if part == RESULTS.name]
    root = RESULTS
    if above and parts[above[-1] + 1 :]:
        root = Path(*parts[: above[-1] + 1])
        root = RESULTS if root.absolute() == RESULTS.absolute() else root
        parts = parts[above[-1] + 1 :]
    if not parts or parts[0] in (DATA, os.sep) or parts[0].startswith("."):
        return None
    return Place(parts[0], parts[1:], root=root)


def run_named(word: str) -> Place:
    """Return a run of this project by its name, its configuration, or its folder.

    Raises:
        PipelineError: the word names no run.
    """
    found = find_place(word)
    if found is None or found.parts or not found.is_here:
        raise PipelineError(
            f"{word!r} names no run", hint="name the run, its configuration, or results/RUN"
        )
    return found


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


@dataclass(frozen=True)
class Trained:
    """A phase's weights or rolling checkpoint.

    Attributes:
        run: The run.
        phase: The phase.
        step: The global step of the weights.
        folder: Published weights, or a rolling checkpoint.
    """

    run: str
    phase: str
    step: int
    folder: Path

    @property
    def is_published(self) -> bool:
        """Return whether these are weights that the phase has published."""
        return self.folder.name == "weights"

    def __str__(self) -> str:
        kind = "weights" if self.is_published else "rolling checkpoint"
        return f"{self.run}/{self.phase}: {kind} of step {self.step} ({self.folder})"


def find_trained(name: Path) -> Trained | None:
    """Find the newest weights of a run, or of one of its phases.

    Args:
        name: RUN, its configuration, RUN/PHASE, or either below results/; or the path of another
            file or folder.

    Returns:
        The newest; published weights before a rolling checkpoint of the same step. None if `name`
        is a file or folder to open directly.

    Raises:
        PipelineError: there is no such run or phase, or it has no weights yet.
    """
    place = find_place(name)
    if place is None or not place.is_here or len(place.parts) > 1:
        return None
    is_folder = place.folder.is_dir() and name.resolve() == place.folder.resolve()
    if name.exists() and not (place.file or is_folder):
        return None
    candidates = [one for one in trained_models(place.run) if place.parts in ((), (one.phase,))]
    if candidates:
        return max(candidates, key=lambda one: (one.step, one.is_published))
    there = _names()
    runs = dict.fromkeys(one.partition("/")[0] for one in there)
    what = (
        "it has neither weights nor a rolling checkpoint yet"
        if place.folder.is_dir()
        else f"no such file or folder, and no run or phase with weights in {RESULTS}"
    )
    listed, named = ", ".join(there) or "none", Path(place.run, *place.parts)
    raise PipelineError(
        f"{name}: {what}",
        hint=after_question(named, [*runs, *there], f"there are weights of: {listed}"),
    )


def trained_models(run: str) -> list[Trained]:
    """List the weights and the newest rolling checkpoint of each phase of a run."""
    found = []
    for phase in RunView(run, folders=phase_folders(run)).phases:
        if weights := phase.weights:
            step = weights.content.get("step")
            step = step if type(step) is int else 0
            found.append(Trained(run, phase.name, step, weights.folder))
        if rolling := phase.newest_rolling:
            found.append(Trained(run, phase.name, phase.steps[-1], rolling))
    return found


def _names() -> list[str]:
    found: list[Trained] = []
    for run in runs_here():
        with suppress(PipelineError, OSError):
            found += trained_models(run)
    return list(dict.fromkeys(f"{one.run}/{one.phase}" for one in found))


@contextmanager
def usable_weights(name: Path) -> Iterator[Path]:
    """Yield the folder or file of weights that a name refers to, and print which it is.

    A rolling checkpoint is first exported next to the phase's other folders, with the values that
    it was trained with, and removed after use.

    Raises:
        PipelineError: a rolling checkpoint is damaged.
    """
    found = find_trained(name)
    if found is None:
        yield name
        return
    if found.is_published:
        print(f"using {found}", file=sys.stderr, flush=True)
        yield found.folder
        return
    family = read_conditions(found.folder).trains["family"]
    print(f"using {found}", file=sys.stderr, flush=True)
    from zerotrain.export.command import export_command

    run = RunFolder(found.run).path
    with (
        handling_signals(unwind),
        artifact.scratch_folder(run / found.phase / "in_use") as scratch,
    ):
        with redirect_stdout(StringIO()):  # its output names the folder, which is removed
            options = ExportOptions(
                found.folder, scratch / "weights", family=family, base=run / "base"
            )
            export_command(options)
        yield scratch / "weights"


def exportable(name: Path, config: Path | None) -> tuple[Path, Path | None]:
    """Return the folder to export that a name refers to, and the configuration that it needs.

    Args:
        name: As for find_trained.
        config: The given configuration; None: find the run's, if needed.
    """
    found = find_trained(name)
    if found is None:
        return name, config
    if config is None and not found.is_published:
        config = find_config(found.run)
    print(f"using {found}", file=sys.stderr, flush=True)
    return found.folder, config
