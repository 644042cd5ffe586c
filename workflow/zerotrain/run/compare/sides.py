"""The runs and phases that a command line names to be compared."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from zerotrain.artifact.layout import DATA, RESULTS, PhaseFolder, files_of
from zerotrain.config.read import read_config
from zerotrain.config.runs import read_runs
from zerotrain.config.suggestions import after_question, join_first
from zerotrain.errors import PipelineError
from zerotrain.run.phase import PhaseView
from zerotrain.run.runs import phase_folders, runs_here

CONFIG_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class Side:
    """A run, or one phase of it."""

    name: str
    """RUN or RUN/PHASE; with the path before it if it is of another project."""
    folders: Sequence[Path]
    """Folders of its phases, in order."""
    phase: str | None = None
    """The phase, which is the last of the folders; None: the whole run."""


def find_sides(names: Sequence[str]) -> list[Side]:
    """Find what is compared, each once, in the order of the command line.

    Args:
        names: RUN, a configuration file (of one run, or of several under `runs`), RUN/PHASE, or
            the path of a folder in one of these. A single run stands for its phases.

    Raises:
        PipelineError: a name is unknown, or there is nothing to compare with.
    """
    sides = list({side.name: side for name in names for side in _find(name)}.values())
    if len(sides) == 1 and sides[0].phase is None:
        run = sides[0]
        sides = [_phase(run, place) for place in range(len(run.folders))]
    if len(sides) < 2:
        raise PipelineError(
            f"{' '.join(names)}: one phase, and nothing to compare it with",
            hint=f"name another run or phase. {_list_known()}",
        )
    return sides


def _find(name: str) -> Iterator[Side]:
    path = Path(name)
    if path.suffix in CONFIG_SUFFIXES and not path.is_dir():
        for run in read_runs(path).values():
            yield _of_run(RESULTS, run.run, [phase.name for phase in run.phases], str(path))
        return
    root, words = _place(path)
    if not words or words[0] == DATA:
        raise _unknown(name)
    side = _of_run(root, words[0], _configured(words[0]) if root == RESULTS else [], name)
    if len(words) == 1:
        yield side
        return
    phases = {folder.name: place for place, folder in enumerate(side.folders)}
    if words[1] in phases:
        yield _phase(side, phases[words[1]])
    elif is_phase(folder := root / words[0] / words[1]):  # the configuration has it no longer
        yield Side(f"{side.name}/{words[1]}", [folder], words[1])
    else:
        raise _unknown(name)


def _place(path: Path) -> tuple[Path, tuple[str, ...]]:
    """Return the results folder that a name or path is in, and the parts below it."""
    parts = path.parts if path.is_absolute() else Path(os.path.normpath(path)).parts
    places = [place for place, part in enumerate(parts) if part == RESULTS.name]
    if places and parts[places[-1] + 1 :]:
        root = Path(*parts[: places[-1] + 1])
        here = root.absolute() == RESULTS.absolute()
        return RESULTS if here else root, parts[places[-1] + 1 :]
    return RESULTS, parts


def _of_run(root: Path, run: str, phases: Sequence[str], given: str) -> Side:
    """Return a run with the phases that have a folder, in order.

    Args:
        root: The results folder.
        run: Name of the run.
        phases: Names of its phases in order; empty: sort those that are there by their steps.
        given: What the user named, for messages.
    """
    folder = root / run
    there = [path for path in folder.glob("*") if is_phase(path)] if folder.is_dir() else []
    if phases:
        there = [folder / name for name in phases if folder / name in there]
    else:
        starts = {path: PhaseView(path).start for path in there}
        there.sort(key=lambda path: (starts[path] is None, starts[path] or 0, path.name))
    if not there and not folder.is_dir():
        raise _unknown(given)
    if not there:
        raise PipelineError(
            f"{given}: no phase of it has been launched",
            hint="`snakemake --cores all train` trains it. " + _list_known(),
        )
    return Side(run if root == RESULTS else str(folder), there)


def _phase(run: Side, place: int) -> Side:
    """Return a phase of a run; the phases before it are part of its log."""
    name = run.folders[place].name
    return Side(f"{run.name}/{name}", run.folders[: place + 1], name)


def is_phase(folder: Path) -> bool:
    """Return whether a phase was launched or trained in a folder."""
    phase = PhaseFolder(folder)
    return any(
        place.exists() for place in (phase.launch / "run.yaml", phase.progress, phase.checkpoint)
    )


def _configured(run: str) -> list[str]:
    """Return the phases of a run as its configuration file has them; empty without a valid one."""
    files = files_of(run)
    try:
        return [one.name for one in read_config(files[0]).phases] if len(files) == 1 else []
    except PipelineError:
        return []


def _known() -> tuple[list[str], list[str]]:
    """Return the runs and the phases that are here."""
    folders = [path for run in runs_here() for path in phase_folders(run) if is_phase(path)]
    runs = dict.fromkeys(path.parent.name for path in folders)
    return [*runs], [f"{path.parent.name}/{path.name}" for path in folders]


def _list_known() -> str:
    phases = _known()[1]
    return f"phases here: {join_first(phases) if phases else 'none'}"


def _unknown(name: str) -> PipelineError:
    runs, phases = _known()
    return PipelineError(
        f"{name}: no such run or phase in {RESULTS}",
        hint=after_question(name, [*runs, *phases], _list_known()),
    )
