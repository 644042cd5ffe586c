"""Progress on stderr: a long stage as a bar on a terminal, else a plain line at intervals; a plan
as one line that is rewritten, and removed at the end."""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")

SECONDS_BETWEEN_LINES = 10.0


def progress(
    iterable: Iterable[T],
    total: int,
    description: str,
    unit: str = "sample",
    count: Callable[[T], int] = lambda item: 1,
) -> Iterator[T]:
    """Yield the items unchanged while stderr shows how many of `total` are done.

    Without a terminal a line is written every ten seconds at most, and one at the end.

    Args:
        total: How many there are in all items together.
        count: How many of them an item holds, for those that come in batches.
    """
    if sys.stderr.isatty():
        with tqdm(total=total, desc=description, unit=f" {unit}", dynamic_ncols=True) as bar:
            for item in iterable:
                yield item
                bar.update(count(item))
        return
    start = last = time.monotonic()
    done = 0
    for item in iterable:
        yield item
        done += count(item)
        now = time.monotonic()
        if now - last >= SECONDS_BETWEEN_LINES and done < total:
            last = now
            _line(description, done, total, unit, now - start)
    _line(description, done, total, unit, time.monotonic() - start)


def _line(description: str, done: int, total: int, unit: str, seconds: float) -> None:
    rate = done / seconds if seconds > 0 else 0.0
    share = f" ({done / total:.0%})" if total else ""
    left = f", {(total - done) / rate:.0f} s left" if rate and done < total else ""
    speed = f"{1 / rate:.1f} s/{unit}" if 0 < rate < 1 else f"{rate:.1f} {unit}s/s"
    print(
        f"{description}: {done} of {total} {unit}s{share}, {speed}, {seconds:.0f} s{left}",
        file=sys.stderr,
        flush=True,
    )


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
