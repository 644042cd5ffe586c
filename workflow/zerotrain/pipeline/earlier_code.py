"""Phases that were trained by other training code than the current version."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from zerotrain.artifact import RECORDS
from zerotrain.artifact.layout import RunFolder
from zerotrain.artifact.sources import training_digest
from zerotrain.config.run import RunConfig
from zerotrain.pipeline.graph.code import stored_reading

MADE_BY = Path(RECORDS, "made_by.json")
"""The published checkpoint's record of the code that trained it, relative to its folder."""


def find_trained_earlier(runs: Iterable[RunConfig]) -> list[tuple[str, str]]:
    """Find the phases whose published checkpoint was trained by other code than the current.

    Args:
        runs: The runs; results are looked up in the working directory.

    Returns:
        Run and phase of each, in order. A checkpoint without a record is from an earlier version.
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
        found = json.loads((checkpoint / MADE_BY).read_bytes())["code"]
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
