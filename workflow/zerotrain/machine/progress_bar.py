"""Progress of a long stage on stderr: a bar on a terminal, else a plain line at intervals."""

from __future__ import annotations

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
