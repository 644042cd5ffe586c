"""Folders that somebody reads are not removed: a shared lock of the kernel's on their manifest.

It ends with its process. On a file system without such locks nothing is held, and nothing waits.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
from pathlib import Path
from typing import IO

from zerotrain.artifact.damage import MANIFEST


def hold(folder: Path) -> IO[str] | None:
    """Keep a folder from being removed while the returned file is open."""
    try:
        stream = (folder / MANIFEST).open()
    except OSError:
        return None  # reading it says what is wrong
    with contextlib.suppress(OSError):
        fcntl.flock(stream, fcntl.LOCK_SH)
    return stream


def remove(folder: Path) -> bool:
    """Remove a published folder, unless somebody holds it; whether it is gone."""
    # Network file systems lock alone only what is open for writing.
    with (folder / MANIFEST).open("r+") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            pass
        # Without its manifest it counts no more, wherever the removal may be cut short.
        (folder / MANIFEST).unlink()
    shutil.rmtree(folder)
    return True
