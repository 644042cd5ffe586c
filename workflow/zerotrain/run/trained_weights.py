"""RUN and RUN/PHASE on a command line: the newest weights of a run.

For a phase in training they come from its newest rolling checkpoint, exported to a folder that is
removed after use.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from zerotrain import artifact
from zerotrain.artifact.layout import RESULTS, RunFolder
from zerotrain.config.runs import find_config
from zerotrain.config.suggestions import after_question
from zerotrain.errors import PipelineError
from zerotrain.export.options import ExportOptions
from zerotrain.machine.child_process import handling_signals, unwind
from zerotrain.run.runs import phase_folders, run_named, runs_here
from zerotrain.run.view import RunView
from zerotrain.training.checkpointing.conditions import read_conditions


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
    if name.suffix in (".yaml", ".yml"):
        name = Path(run_named(str(name))[0])
    words = name.parts[1:] if name.parts[:1] == RESULTS.parts else name.parts
    folder = RESULTS.joinpath(*words)
    named = 1 <= len(words) <= 2 and not name.is_absolute()
    if name.exists() and not (named and folder.is_dir() and name.resolve() == folder.resolve()):
        return None
    if not named:
        return None
    candidates = trained_models(words[0])
    if len(words) == 2:
        candidates = [one for one in candidates if one.phase == words[1]]
    if candidates:
        return max(candidates, key=lambda one: (one.step, one.is_published))
    there = _names()
    runs = dict.fromkeys(one.partition("/")[0] for one in there)
    what = (
        "it has neither weights nor a rolling checkpoint yet"
        if folder.is_dir()
        else f"no such file or folder, and no run or phase with weights in {RESULTS}"
    )
    listed = ", ".join(there) or "none"
    raise PipelineError(
        f"{name}: {what}",
        hint=after_question(Path(*words), [*runs, *there], f"there are weights of: {listed}"),
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
