"""Protection of folders that a process reads from removal: a shared kernel lock on the manifest.

The lock ends with its process. On a file system without such locks nothing is protected, and
nothing waits.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
from pathlib import Path
from typing import IO

from zerotrain.artifact.damage import MANIFEST

REMOVED = ".removed"


def hold(folder: Path) -> IO[str] | None:
    """Protect a folder from removal while the returned file is open."""
    try:
        stream = (folder / MANIFEST).open()
    except OSError:
        return None  # reading it reports the error
    with contextlib.suppress(OSError):
        fcntl.flock(stream, fcntl.LOCK_SH)
    return stream


def remove(folder: Path) -> bool:
    """Remove a published folder, unless a process holds it; return whether it is gone."""
    # Network file systems lock only files that are open for writing.
    with (folder / MANIFEST).open("r+") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            pass
        # Under this name it no longer counts, even if the removal is interrupted.
        removed = folder.with_name(f".{folder.name}{REMOVED}")
        if removed.exists():
            shutil.rmtree(removed)
        folder.rename(removed)
    shutil.rmtree(removed)
    return True
