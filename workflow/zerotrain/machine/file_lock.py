"""Kernel locks of files (flock): each ends with the process that holds it, or with its last copy.

On a file system without such locks nothing is protected, and nothing waits.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from zerotrain.machine.disk_errors import writing
from zerotrain.machine.regular_file import open_to_change


def lock_stream(stream: IO[Any] | int, *, shared: bool = False, wait: bool = False) -> bool | None:
    """Lock an open file until it is closed.

    Args:
        stream: The file, or its descriptor.
        shared: Whether others may lock it, too, as `shared`.
        wait: Whether to wait for a process that holds it.

    Returns:
        Whether it is locked now, or False if another process holds it; None: the file system has
        no such locks.
    """
    how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(stream, how if wait else how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def hold(path: Path) -> IO[str]:
    """Lock a file while this process lives and the returned stream is open.

    Raises:
        FileError: it is missing, or is a link, a folder, a pipe or a device.
        OSError: the file cannot be opened.
    """
    stream = open_to_change(path)
    lock_stream(stream)
    return stream


def is_held(path: Path) -> bool | None:
    """Return whether a live process holds a file; None if that cannot be determined."""
    try:
        with open_to_change(path) as stream:
            locked = lock_stream(stream)
    except OSError:
        return None
    return None if locked is None else not locked


@contextlib.contextmanager
def one_at_a_time(file: Path) -> Iterator[bool]:
    """Let one process at a time run the block; the others wait.

    Args:
        file: The lock's file, which is made with its folder if it is missing.

    Yields:
        Whether others wait; not on a file system without locks.

    Raises:
        DiskError: the file cannot be made.
    """
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        stream = open_to_change(file, make=True)
    with stream:
        yield lock_stream(stream, wait=True) is True
