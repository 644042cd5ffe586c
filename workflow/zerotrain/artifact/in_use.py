"""Protection of folders that a process reads from removal: a shared kernel lock on the manifest.

A folder that is being made again has no manifest, and is replaced at the end: its writers lock the
folder above it. A lock ends with its process. On a file system without such locks nothing is
protected, and nothing waits.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from zerotrain.artifact.damage import MANIFEST
from zerotrain.machine.file_lock import lock_stream
from zerotrain.machine.regular_file import FileError, open_to_change, open_to_read

REMOVED = ".removed"


def hold(folder: Path) -> IO[Any] | None:
    """Protect a folder from removal while the returned file is open."""
    try:
        stream = open_to_read(folder / MANIFEST)
    except OSError:
        return None  # reading it reports the error
    lock_stream(stream, shared=True, wait=True)
    return stream


def is_held(folder: Path) -> bool:
    """Return whether a process protects a published folder from removal."""
    with contextlib.suppress(FileError), open_to_read(folder / MANIFEST) as stream:
        return lock_stream(stream) is False
    return False


class WriterLock:
    """A claim of this process to write a folder, until `release` or the end of the process.

    Several writers may share it; a process in `without_writers` is waited for.
    """

    def __init__(self, folder: Path) -> None:
        self._place: int | None = None
        with contextlib.suppress(FileNotFoundError):
            self._place = os.open(folder.parent, os.O_RDONLY | os.O_DIRECTORY)
            lock_stream(self._place, shared=True, wait=True)

    def release(self) -> None:
        """Give up the claim."""
        if self._place is not None:
            os.close(self._place)
            self._place = None

    __del__ = release


@contextlib.contextmanager
def without_writers(folder: Path) -> Iterator[bool]:
    """Keep writers of a folder and its neighbours waiting; yield False if one is at work."""
    place = os.open(folder.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield lock_stream(place) is not False
    finally:
        os.close(place)


def remove(folder: Path) -> bool:
    """Remove a published folder, unless a process holds it; return whether it is gone.

    Raises:
        FileError: its manifest is missing, or is a link, a folder or a pipe.
        OSError: it cannot be removed.
    """
    # Network file systems lock only files that are open for writing.
    with open_to_change(folder / MANIFEST) as stream:
        if lock_stream(stream) is False:
            return False
        # Under this name it no longer counts, even if the removal is interrupted.
        removed = folder.with_name(f".{folder.name}{REMOVED}")
        if removed.exists():
            shutil.rmtree(removed)
        folder.rename(removed)
    shutil.rmtree(removed)
    return True
