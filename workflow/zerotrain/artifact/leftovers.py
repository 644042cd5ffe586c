"""Temporary folders of a writer, and recovery from those of a killed writer.

The name identifies the writer: .<name>.new-<host>-<pid>, and .old- during an exchange, if the file
system cannot exchange names atomically. Whether a writer on another host or in another container is
alive cannot be determined; its last write is used instead, by the clock of the file system.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from zerotrain.machine.liveness import pid_space, time_there

HOST = pid_space()
SILENT_SECONDS = {"new": 24 * 3600.0, "old": 60.0}
"""Seconds after which a writer of another host counts as ended: hashing and copying a model takes
hours at most, the exchange of two names a moment."""


def temporary_path(path: Path, kind: str) -> Path:
    """Return the path where this process writes a file or folder before it replaces `path` (kind
    `new`), or moves the former one (`old`)."""
    return path.with_name(f".{path.name}.{kind}-{HOST}-{os.getpid()}")


def recover_interrupted_publish(folder: Path, *, alone: bool = False) -> None:
    """Clean up after a killed writer next to the folder: restore the old one, remove the new.

    Args:
        folder: The published folder, or its future place.
        alone: Whether a lock guarantees that no process of another host writes here.
    """
    if not folder.parent.is_dir():
        return
    name = glob.escape(folder.name)
    for old in folder.parent.glob(f".{name}.old-*"):
        if _writer_lives(old, "old", alone):
            continue
        # Several readers may recover at once, and without write permission recovery is skipped.
        with contextlib.suppress(OSError):
            folder.rmdir()  # an empty folder, as Snakemake creates before a job
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                old.rename(folder)
    for new in folder.parent.glob(f".{name}.new-*"):
        if _writer_lives(new, "new", alone):
            continue
        if new.is_dir():
            shutil.rmtree(new, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                new.unlink()


@contextlib.contextmanager
def scratch_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder next to `path`, and remove it when the block ends.

    Leftovers of killed processes are removed first.
    """
    recover_interrupted_publish(path)
    folder = temporary_path(path, "new")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _writer_lives(leftover: Path, kind: str, alone: bool) -> bool:
    """Return whether the process in the name is alive and wrote it; its pid may be reused."""
    host, _, pid = leftover.name.rpartition(f".{kind}-")[2].rpartition("-")
    if alone and host not in ("", HOST):
        return False
    try:
        written = max(path.lstat().st_ctime for path in (leftover, *leftover.rglob("*")))
        age = time_there(leftover.parent) - written
        if host not in ("", HOST):
            return age < SILENT_SECONDS[kind]
        process = psutil.Process(int(pid))
        ended = process.status() == psutil.STATUS_ZOMBIE
        # Boot time, and some disks' times, have a resolution of whole seconds: allow for 5.
        return not ended and time.time() - process.create_time() >= age - 5
    except (ValueError, psutil.NoSuchProcess, FileNotFoundError):
        return False
    except OSError:  # not writable, so not removable either
        return True
