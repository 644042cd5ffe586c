"""Phases that another version of `train_phase` trained: they are reported, and stay."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from zerotrain.artifact import RECORDS
from zerotrain.artifact.documents import read_object
from zerotrain.artifact.layout import RunFolder
from zerotrain.artifact.stage_versions import VERSIONS
from zerotrain.config.run import RunConfig

STAGE = "train_phase"
MADE_BY = Path(RECORDS, "made_by.json")
"""The published checkpoint's record of what trained it, relative to its folder."""


def find_trained_earlier(runs: Iterable[RunConfig]) -> list[tuple[str, str]]:
    """Find the phases whose published checkpoint another version of the stage trained.

    Args:
        runs: The runs; results are looked up in the working directory.

    Returns:
        Run and phase of each, in order. A checkpoint without a readable record counts.
    """
    checkpoints = {
        (run.run, phase.name): RunFolder(run.run).phase(phase.name).checkpoint
        for run in runs
        for phase in run.phases
    }
    return [
        names
        for names, checkpoint in checkpoints.items()
        if (checkpoint / "checkpoint.json").exists()
        and _recorded_version(checkpoint) != VERSIONS[STAGE]
    ]


def describe_trained_earlier(found: list[tuple[str, str]]) -> str | None:
    """Describe how many phases another version trained; None without any."""
    if not found:
        return None
    count = f"{len(found)} phase was" if len(found) == 1 else f"{len(found)} phases were"
    return (
        f"{count} trained by another version of {STAGE} than {VERSIONS[STAGE]} and "
        f"{'stays as it is' if len(found) == 1 else 'stay as they are'}"
    )


def _recorded_version(checkpoint: Path) -> int | None:
    try:
        found = read_object(checkpoint / MADE_BY)["version"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return found if isinstance(found, int) else None
