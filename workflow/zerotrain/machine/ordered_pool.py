"""A pool that reads ahead a little and yields results in order, whatever its size."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")


def in_order(function: Callable[[A], B], items: Iterable[A], num_workers: int) -> Iterator[B]:
    """Apply a function in `num_workers` threads (0: in this one); yield results in order.

    Threads suffice: decoding, resizing and hashing release the GIL. At most four results per worker
    are pending, so memory does not grow with the number of items.
    """
    if num_workers == 0:
        yield from map(function, items)
        return
    pool = ThreadPoolExecutor(num_workers)
    waiting: deque[Future[B]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) >= 4 * num_workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
