"""The sha256 of files, stored on this machine by device, inode, size and time of change.

The time of change (ctime) is set by the kernel: no program can reset it, so a file that was written
to is read again. The folder is $XDG_CACHE_HOME/zerotrain or ~/.cache/zerotrain. If it is not
accessible, nothing is stored, and nothing else changes.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from zerotrain.artifact.documents import read_object
from zerotrain.machine.regular_file import write_text

LEAST_BYTES = 4 * 1024**2
"""Smaller files are not stored: hashing them is faster than a lookup."""
MOST = 4096
"""Number of stored files, those of the latest verdicts."""
SETTLED_SECONDS = 2.0
"""A file that changed this shortly before it was read may change again within one tick of the file
system's clock, which would leave its ctime unchanged."""
LOCK = threading.Lock()

Verdicts = dict[str, str]
"""sha256 by key_of a file."""


def verdicts_file() -> Path:
    """Return the path of the stored verdicts."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "zerotrain" / "verdicts.json"


def key_of(stat: os.stat_result) -> str:
    """Return a key for a file and its current content."""
    return f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_ctime_ns}"


def load() -> Verdicts:
    """Read all verdicts; a missing or damaged file has none."""
    try:
        found = read_object(verdicts_file())
    except (OSError, ValueError, RuntimeError):  # RuntimeError: no home folder
        return {}
    return {key: value for key, value in found.items() if isinstance(value, str)}


def remembering(sha256: Callable[[Path], str]) -> Callable[[Path], str]:
    """Return a function that hashes a file, or returns its stored hash."""

    def remembered(path: Path) -> str:
        before = path.stat()
        if before.st_size < LEAST_BYTES:
            return sha256(path)
        if (known := load().get(key_of(before))) is not None:
            return known
        found = sha256(path)
        remember(path, before, found)
        return found

    return remembered


def remember(path: Path, before: os.stat_result, sha256: str) -> None:
    """Store a file's sha256, unless it may have changed while it was read.

    Args:
        path: The file.
        before: Its status before it was read.
        sha256: The sha256 of the bytes that were read.
    """
    with contextlib.suppress(OSError, RuntimeError), LOCK:
        unchanged = key_of(path.stat()) == key_of(before)
        if not unchanged or time.time() - before.st_ctime < SETTLED_SECONDS:
            return
        inode = f"{before.st_dev}:{before.st_ino}:"
        others = [(key, one) for key, one in load().items() if not key.startswith(inode)]
        _write(dict([*others[1 - MOST :], (key_of(before), sha256)]))


def _write(verdicts: Verdicts) -> None:
    target = verdicts_file()
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        write_text(draft, json.dumps(verdicts, indent=0))
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
