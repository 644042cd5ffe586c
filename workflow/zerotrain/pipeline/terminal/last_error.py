"""The error with which a stage's log ends, for stages that ran on another machine or before."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

ERROR_LINES = 6
"""Lines of the log that are shown."""


def last_error(logs: list[str], sizes: Mapping[str, int], *, at_end: bool = False) -> list[str]:
    """Return a failed stage's error message, from the last `ERROR` line of its logs.

    Args:
        logs: Log files; the first with such a line is used.
        sizes: Size of each file in bytes before the stage started: logs are appended to.
        at_end: Whether only the end of a log counts, so that nothing succeeded after the error.
    """
    for log in logs:
        before = sizes.get(log, 0)
        try:
            with Path(log).open("rb") as stream:
                stream.seek(before if before <= log_size(log) else 0)
                lines = stream.read().decode(errors="replace").splitlines()
        except OSError:
            continue
        places = [place for place, line in enumerate(lines) if line.startswith("ERROR")]
        if at_end and places and places[-1] < len(lines) - ERROR_LINES:
            continue
        if places:
            return lines[places[-1] :][:ERROR_LINES]
    return []


def log_size(path: str) -> int:
    """Return the bytes of a log; 0 if it is missing."""
    try:
        return Path(path).stat().st_size
    except OSError:
        return 0
