"""Progress of a plan on the terminal: one line that is rewritten, and removed at the end."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator

Tell = Callable[[str], None]
ERASE = "\r\x1b[2K"
"""Escape sequence that moves to the start of the line and clears it."""


def ignore(_: str) -> None:
    """Show nothing."""


@contextlib.contextmanager
def progress_line(*, written: bool = False) -> Iterator[Tell]:
    """Yield a function that shows the current action on standard error.

    If that is not a terminal, only the first line is written, and stays.

    Args:
        written: Whether that line has already been written.
    """
    terminal = sys.stderr.isatty()

    def tell(text: str) -> None:
        nonlocal written
        if terminal:
            shown = text[: shutil.get_terminal_size().columns - 1]
            print(f"{ERASE}{shown}", end="", file=sys.stderr, flush=True)
        elif not written:
            print(text, file=sys.stderr, flush=True)
        written = True

    try:
        yield tell
    finally:
        if terminal and written:
            print(ERASE, end="", file=sys.stderr, flush=True)
