"""The lease of a lock: its owner gives regular signs of life; without them the lease expires.

A sign is a new modification time of the lock file. A thread of the owner sets it, so signs
continue while the owner loads, compiles or saves a model. The file stays open: if another file
becomes the lock, the signs of this thread do not count for it.

Ages are measured by the clock of the file system. A lease only decides if nothing else shows
whether the owner is alive (zerotrain.training.process.lock_owner).
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from zerotrain.machine.liveness import time_there

LEASE_SECONDS = 120
"""Twelve signs: the thread is only later than that if its process or its machine was stopped."""
SIGN_SECONDS = 10.0
SIGNS_IN_LEASE = 6
"""Minimum number of signs in a lease, however short it is."""
CLOSE_SECONDS = 2.0


def sign_seconds(lease: float) -> float:
    """Return the seconds between two signs of an owner."""
    return min(SIGN_SECONDS, lease / SIGNS_IN_LEASE)


class SignsOfLife:
    """Thread that gives signs of life through a lock file until it is closed."""

    def __init__(self, file: Path, lease: float) -> None:
        self._handle = os.open(file, os.O_RDWR)
        self._every = sign_seconds(lease)
        self._closed = threading.Event()
        self._sign()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the signs, and close the file."""
        if not self._closed.is_set():
            self._closed.set()
            self._thread.join(CLOSE_SECONDS)
            if not self._thread.is_alive():  # else the thread waits for a disk and uses the file
                os.close(self._handle)

    def _run(self) -> None:
        while not self._closed.wait(self._every):
            self._sign()

    def _sign(self) -> None:
        with contextlib.suppress(OSError):  # a network disk that does not respond now
            os.utime(self._handle)


def last_sign(file: Path) -> float | None:
    """Return the time of the last sign by the file system's clock; None: no such file."""
    try:
        with file.open("rb") as stream:  # opening it makes a network file system ask its server
            return os.fstat(stream.fileno()).st_mtime
    except FileNotFoundError:
        return None


def silent_seconds(file: Path) -> float:
    """Return the seconds since the owner's last sign; 0 if there is no such file.

    Raises:
        OSError: the folder is not writable.
    """
    last = last_sign(file)
    return 0.0 if last is None else max(0.0, time_there(file.parent) - last)
