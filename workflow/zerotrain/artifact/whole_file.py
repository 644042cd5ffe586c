"""Atomic writes of files: first next to their place, then renamed into it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from zerotrain.artifact.leftovers import recover_interrupted_publish, temporary_path
from zerotrain.artifact.links import check_no_link_above
from zerotrain.machine.disk_errors import check_no_file, writing
from zerotrain.machine.regular_file import open_new, write_text

AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""Constants of renameat2(2)."""


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary file to write, which then replaces `path`.

    The former file stays until then, and also if the block raises; the temporary file and the
    folders that were created for it are then removed.

    Raises:
        PipelineError: a file is above it.
        DiskError: the disk is full or read-only, or fails.
    """
    check_no_file(path.parent)
    check_no_link_above(path)
    new = temporary_path(path, "new")
    with writing(path):
        made = [folder for folder in path.parents if not folder.exists()]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            recover_interrupted_publish(path)
            new.unlink(missing_ok=True)
            yield new
            sync(new)
            new.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)
                for folder in made:
                    folder.rmdir()
            raise


def write_whole(path: Path, text: str) -> None:
    """Write a text file as UTF-8, completely or not at all.

    Raises:
        DiskError: the disk is full or read-only, or fails; `path` is unchanged.
    """
    with replacing(path) as new:
        write_text(new, text)


def create(path: Path, text: str) -> None:
    """Write a new text file as UTF-8, completely or not at all; overwrite nothing.

    Raises:
        FileExistsError: the file exists already.
        DiskError: the disk is full or read-only, or fails.
    """
    with writing(path):
        new = temporary_path(path, "new")
        try:
            write_text(new, text)
            sync(new)
            try:
                os.link(new, path)
            except FileExistsError:
                raise
            except OSError:  # a file system without hard links
                open_new(path, replace=False).close()
                new.replace(path)
        finally:
            with contextlib.suppress(OSError):
                new.unlink()


def exchange(first: Path, second: Path) -> int:
    """Exchange the names of two files or folders; neither is missing at any moment.

    Returns:
        0, or the error number; nothing has changed then. ENOSYS if the system has no such call.
    """
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:  # another system, or an old C library
        return errno.ENOSYS
    names = os.fsencode(first), os.fsencode(second)
    done = renameat2(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE)
    return ctypes.get_errno() if done else 0


def sync(path: Path) -> None:
    """Flush a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
