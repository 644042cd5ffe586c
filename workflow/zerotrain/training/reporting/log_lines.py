"""The lines of a run's log, metrics.jsonl: docs/monitoring.md describes their keys.

The log of a phase continues the log of the phase before, so the newest one holds the run up to
there. `training.reporting.log` writes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerotrain.artifact import documents
from zerotrain.artifact.documents import DocumentError, check_object, check_type, parse_json
from zerotrain.artifact.layout import LOG
from zerotrain.state.position import Count

Line = Mapping[str, Any]
"""A line of the log: "phase" and "step", and what was measured there."""


@dataclass(frozen=True)
class LoggedStep:
    """What is computed with of a line."""

    phase: str
    step: Count
    loss: float | None = None
    """None if every update was skipped."""
    skipped: int = 0


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a log; a last line that is still being written is left out.

    Raises:
        PipelineError: a line is not an object with a phase and a step.
    """
    hint = "the log is damaged; remove that line, or train the phase again"
    for number, written in enumerate(documents.read_lines(path, hint=hint), start=1):
        if not written.endswith(b"\n"):
            return
        where = f"{path}: line {number}"
        line = check_object(parse_json(written, where, hint=hint), where, hint=hint)
        check_type(line, LoggedStep, where, hint=hint)
        yield line


def read_line(written: bytes) -> dict[str, Any] | None:
    """Return a line that has a phase and a step; None if it is damaged, or only half written."""
    try:
        line = check_object(parse_json(written, LOG), LOG)
    except DocumentError:
        return None
    has_place = isinstance(line.get("step"), int) and isinstance(line.get("phase"), str)
    return line if has_place else None
