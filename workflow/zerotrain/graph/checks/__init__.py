"""Checks of a run before any stage starts; they load neither a model nor torch.

`zerotrain check` and the Snakefile call them, so both report the same, except that a plan reads no
captions. Each part returns the errors
that a stage would raise later; they are reported together, with the lines of the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from zerotrain.artifact.documents import read_text
from zerotrain.artifact.layout import RunFolder
from zerotrain.config.data import DataConfig
from zerotrain.config.families import DEFAULT
from zerotrain.config.problems import InvalidConfigError, Problem, collect_errors, join_problems
from zerotrain.config.run import RunConfig
from zerotrain.config.runs import read_runs
from zerotrain.errors import PipelineError
from zerotrain.graph.checks.base import check_base, check_named_base, forget_bases
from zerotrain.graph.checks.data import (
    check_conditioning_images,
    check_data,
    check_source,
    forget_data,
)
from zerotrain.graph.checks.paths import check_paths
from zerotrain.graph.checks.phases import check_phases


def read_checked_runs(path: Path, *, captions: bool = False) -> dict[str, RunConfig]:
    """Read the runs of a configuration file as config.runs.read_runs does, and check them.

    Args:
        path: The file.
        captions: Whether to read rows of text, and caption files next to images, which takes a plan
            too long each time.

    Raises:
        PipelineError: all problems of the first file that has any, in its values and in what it
            names.
    """
    try:
        runs = read_runs(path)
    except InvalidConfigError as error:
        others = [Problem(p.what, p.hint) for p in _problems_of_values(error.raw)]
        raise join_problems(error.source, [*error.problems, *others], error.text) from error
    check_runs(runs, captions=captions)
    return runs


def check_runs(runs: Mapping[str, RunConfig], *, captions: bool = False) -> None:
    """Check what runs refer to: base, data, checkpoint, presets, launches, adapters.

    Args:
        runs: Valid configurations, by the files that hold them.
        captions: As of read_checked_runs.

    Raises:
        PipelineError: all problems of the first file that has any.
    """
    for file, run in runs.items():
        _raise_joined(Path(file), find_problems(run, captions=captions))


def check_launches(file: Path, run: RunConfig) -> None:
    """Check a run's phases alone, of which another part of the configuration was checked before.

    Raises:
        PipelineError: all problems of its phases.
    """
    _raise_joined(file, check_phases(run))


def _raise_joined(file: Path, problems: Sequence[PipelineError]) -> None:
    if problems:
        text = read_text(file, follow_links=True) if file.is_file() else None
        raise join_problems(str(file), [Problem(p.what, p.hint) for p in problems], text)


def forget_checks() -> None:
    """Look at folders again, of which this process has checked some; a command checks each once."""
    forget_bases()
    forget_data()


def _problems_of_values(raw: Mapping[str, Any]) -> list[PipelineError]:
    """List what is wrong with the base and the data of a file whose other values are invalid."""
    if found := check_paths(raw):
        return found
    found = list(check_named_base(raw.get("family", DEFAULT), raw.get("base"), raw.get("revision")))
    try:
        return [*found, *check_source(DataConfig.model_validate(raw.get("data")))]
    except ValidationError:
        return found


def find_problems(run: RunConfig, *, captions: bool = False) -> list[PipelineError]:
    """List what stages would refuse in a valid configuration, in the order of its file."""
    return check_paths(run.model_dump()) or [
        *check_base(run),
        *check_resume(run),
        *check_data(run, captions=captions),
        *check_conditioning_images(run),
        *check_phases(run),
    ]


def check_resume(run: RunConfig) -> list[PipelineError]:
    """List what is missing from resume_from_checkpoint, unless the run has already imported it."""
    resume = run.resume_from_checkpoint
    if resume is None or (RunFolder(run.run).imported_state / "manifest.json").is_file():
        return []
    return collect_errors(lambda: _check_folder(resume.folder), lambda: _check_names(resume.names))


def _check_folder(folder: str) -> None:
    path = Path(folder).expanduser()
    empty = path.is_dir() and not any(path.iterdir())
    if empty or not path.exists():
        raise PipelineError(
            f"resume_from_checkpoint: {path}: no such folder, or nothing in it",
            hint="name a folder that exists, or remove `resume_from_checkpoint`",
        )


def _check_names(names: str | None) -> None:
    if names not in (None, "module") and not Path(str(names)).expanduser().is_file():
        raise PipelineError(
            f"resume_from_checkpoint.names: {names}: no such file",
            hint="name a text file with a parameter's name a line, or write `module`",
        )
