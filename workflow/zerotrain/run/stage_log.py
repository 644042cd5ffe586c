"""The log of a stage: its size, and the error message with which it ends."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from zerotrain.machine.regular_file import open_to_read

ERROR_LINES = 6
"""Lines of the log that are shown."""
MOST_BYTES = 4 * 2**20
"""End of a log that is looked through."""


def last_error(logs: Sequence[str], sizes: Mapping[str, int], *, at_end: bool = False) -> list[str]:
    """Return a failed stage's error message, from the last `ERROR` line of its logs.

    Args:
        logs: Log files; the first with such a line is used.
        sizes: Size of each file in bytes before the stage started: logs are appended to.
        at_end: Whether only the end of a log counts, so that nothing succeeded after the error.
    """
    for log in logs:
        before = sizes.get(log, 0)
        try:
            with open_to_read(Path(log)) as stream:
                size = os.fstat(stream.fileno()).st_size
                stream.seek(max(before if before <= size else 0, size - MOST_BYTES))
                lines = stream.read(MOST_BYTES).decode(errors="replace").splitlines()
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
