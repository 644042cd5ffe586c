"""What a writer has beside a folder, and the mending of what a killed one left.

The name says who writes: .<name>.new-<host>-<pid>, and .old- in the moment of an exchange. Whether
a writer of another host lives cannot be seen from here; what it has written last tells.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import socket
import time
from pathlib import Path

import psutil

HOST = socket.gethostname().replace(".", "_")
SILENT_SECONDS = {"new": 24 * 3600.0, "old": 60.0}
"""After which a writer of another host has ended: hashing and copying of a model take hours at
most, the exchange of two names a moment."""


def beside(path: Path, kind: str) -> Path:
    """Where this process writes a file or folder before it takes its place (kind `new`), and puts
    the one that had the place (`old`)."""
    return path.with_name(f".{path.name}.{kind}-{HOST}-{os.getpid()}")


def mend(folder: Path, *, alone: bool = False) -> None:
    """Clear what a killed writer left beside the folder: the old one comes back, the new goes.

    Args:
        folder: The published folder, or where it would be.
        alone: Whether a lock says that no process of another host writes here.
    """
    if not folder.parent.is_dir():
        return
    name = glob.escape(folder.name)
    for old in folder.parent.glob(f".{name}.old-*"):
        if _writer_lives(old, "old", alone):
            continue
        # Two readers may mend at once, and one that may only read cannot: then it stays.
        with contextlib.suppress(OSError):
            folder.rmdir()  # an empty folder, as Snakemake makes before a job
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


def _writer_lives(leftover: Path, kind: str, alone: bool) -> bool:
    """Whether the process that the name ends with wrote it: a later one of that pid did not."""
    host, _, pid = leftover.name.rpartition(f".{kind}-")[2].rpartition("-")
    try:
        if host not in ("", HOST):
            return not alone and time.time() - _written_last(leftover) < SILENT_SECONDS[kind]
        process = psutil.Process(int(pid))
        ended = process.status() == psutil.STATUS_ZOMBIE
        # Clocks of file servers differ, and boot time is read in whole seconds: 5 are allowed for.
        return not ended and process.create_time() <= leftover.lstat().st_ctime + 5
    except (ValueError, psutil.NoSuchProcess, FileNotFoundError):
        return False


def _written_last(leftover: Path) -> float:
    return max(path.lstat().st_ctime for path in (leftover, *leftover.rglob("*")))
