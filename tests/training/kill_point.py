"""kill -9 before a chosen change of the disk: the same place on fast machines and on slow ones.

What a killed process leaves behind is the disk as it was between two of its changes, so these are
the moments that differ.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
CHANGES = {
    "open": 0, "os.mkdir": 0, "os.rmdir": 0, "os.remove": 0, "os.chmod": 0, "os.rename": 1,
    "os.link": 1,
}  # fmt: skip
"""Events of Python's that change the disk, and which of their arguments is the path."""


class KillPoint:
    """Counts the changes below a folder that a process begins, and kills it before one of them."""

    def __init__(self, server: Any, folder: Path, change: int | None = None) -> None:
        self._folder, self._change = f"{folder}/", change
        self._started = server.Value("i", 0, lock=False)

    @property
    def started(self) -> int:
        """The changes so far, also of a process that has ended."""
        return int(self._started.value)

    def arm(self) -> None:
        """From now on this process's changes count."""
        sys.addaudithook(self._watch)

    def _watch(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in CHANGES or (event == "open" and not _writes(arguments)):
            return
        path = _place(event, arguments)
        # TensorBoard writes from a thread, whose changes come now earlier, now later.
        if path.startswith(self._folder) and "/tensorboard/" not in path:
            self._started.value += 1
            if self._started.value == self._change:
                os.kill(os.getpid(), signal.SIGKILL)


def _writes(arguments: tuple[Any, ...]) -> bool:
    path, _, flags = arguments
    return not isinstance(path, int) and bool(flags & WRITES)


def _place(event: str, arguments: tuple[Any, ...]) -> str:
    """The path that changes; shutil.rmtree gives names within an open folder."""
    path = os.fsdecode(arguments[CHANGES[event]])
    folder = -1 if event == "open" else arguments[-1]
    return path if folder == -1 else f"{os.readlink(f'/proc/self/fd/{folder}')}/{path}"


def spread(changes: int, count: int, seed: int) -> list[int]:
    """So many of the changes from 1 on: one that the seed draws out of each of equal parts."""
    assert changes >= count
    draw = random.Random(seed)
    ends = [changes * part // count for part in range(count + 1)]
    return [draw.randint(first + 1, last) for first, last in pairwise(ends)]
