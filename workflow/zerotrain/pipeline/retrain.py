"""Phases that were trained by other code than the current version, and `zerotrain retrain`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from zerotrain.artifact import RECORDS, is_published
from zerotrain.artifact.documents import read_object
from zerotrain.artifact.layout import RunFolder
from zerotrain.artifact.sources import training_digest
from zerotrain.config.run import RunConfig
from zerotrain.config.runs import find_config, read_runs
from zerotrain.errors import PipelineError
from zerotrain.pipeline import snakemake
from zerotrain.pipeline.graph.code import stored_reading
from zerotrain.training.checkpointing.progress_folder import saved_steps
from zerotrain.training.checkpointing.set_aside import (
    next_aside_folder,
    restore_command,
    stale_folders,
)
from zerotrain.training.process.lock import LOCK, take

MADE_BY = Path(RECORDS, "made_by.json")
"""The published checkpoint's record of the code that trained it, relative to its folder."""


def find_trained_earlier(runs: Iterable[RunConfig]) -> list[tuple[str, str]]:
    """Find the phases whose published checkpoint was trained by other code than the current.

    Args:
        runs: The runs; results are looked up in the working directory.

    Returns:
        Run and phase of each, in order. A checkpoint without a readable record counts.
    """
    digests: dict[str, str] = {}
    found = []
    for run in runs:
        for phase in run.phases:
            checkpoint = RunFolder(run.run).phase(phase.name).checkpoint
            if not (checkpoint / "checkpoint.json").exists():
                continue
            if run.family not in digests:
                with stored_reading():
                    digests[run.family] = training_digest(run.family)
            if recorded_code(checkpoint) != digests[run.family]:
                found.append((run.run, phase.name))
    return found


def recorded_code(checkpoint: Path) -> str | None:
    """Read the digest of the code that trained a published checkpoint; None if not recorded."""
    try:
        found = read_object(checkpoint / MADE_BY)["code"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return str(found)


def describe_trained_earlier(found: list[tuple[str, str]]) -> str | None:
    """Describe how many phases an earlier version trained, and how to train them again."""
    if not found:
        return None
    runs = {run for run, _ in found}
    count = f"{len(found)} phase was" if len(found) == 1 else f"{len(found)} phases were"
    again = f"zerotrain retrain {next(iter(runs)) if len(runs) == 1 else 'RUN'}"
    return (
        f"{count} trained by an earlier version; `{again}` trains "
        f"{'it' if len(found) == 1 else 'them'} again"
    )


def retrain(run: str, phase: str | None) -> list[str]:
    """Set aside the training results of phases, so that the next `snakemake` trains them again.

    Args:
        run: A run's name, or its configuration.
        phase: The phase; default: all phases that an earlier version of the code trained.

    Returns:
        Lines with the new place, how to restore it, and the command that trains again.

    Raises:
        PipelineError: there is nothing to train again, or a training is running.
    """
    file = find_config(run)
    found = next(iter(read_runs(file).values()))
    names = [phase] if phase else [name for _, name in find_trained_earlier([found])]
    _check_phases(found, phase, names)
    lines = []
    for name in names:
        folder = RunFolder(found.run).phase(name).path
        aside = set_aside(folder)
        lines.append(f"{found.run}/{name}: what was trained is kept as {aside}")
        lines.append(f"  restore it: {restore_command(folder, aside)}")
    return [*lines, f"train again: {snakemake.train_command(file)}"]


def _check_phases(run: RunConfig, phase: str | None, names: list[str]) -> None:
    known = [one.name for one in run.phases]
    if phase is not None and phase not in known:
        raise PipelineError(
            f"{run.run}: it has no phase {phase}", hint=f"its phases: {', '.join(known)}"
        )
    if not names:
        raise PipelineError(
            f"{run.run}: no phase was trained by an earlier version of the code",
            hint=f"name the one to train again: --phase {known[0]}",
        )
    if phase is not None and not has_steps(RunFolder(run.run).phase(phase).path):
        raise PipelineError(
            f"{run.run}/{phase}: nothing is trained yet", hint="`snakemake` trains it"
        )


def has_steps(folder: Path) -> bool:
    """Return whether a phase has a checkpoint, a published or a rolling one."""
    return is_published(folder / "checkpoint") or bool(saved_steps(folder / "progress"))


def set_aside(folder: Path) -> Path:
    """Move a phase's checkpoint and all of its progress into a new folder next to them.

    Args:
        folder: The phase's folder, results/RUN/PHASE.

    Returns:
        The new folder, with both under their names.

    Raises:
        PipelineError: a training of the phase is running; the message names its process.
    """
    progress = folder / "progress"
    lock = take(progress)
    try:
        aside = next_aside_folder(folder)
        (aside / "progress").mkdir(parents=True)
        if (folder / "checkpoint").exists():
            (folder / "checkpoint").rename(aside / "checkpoint")
        for item in list(progress.iterdir()):
            if not item.name.startswith(LOCK):
                item.rename(aside / "progress" / item.name)
        for stale in stale_folders(progress):  # otherwise one could be taken back
            stale.rename(aside / stale.name)
    finally:
        lock.release()
    return aside
