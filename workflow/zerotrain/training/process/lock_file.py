"""The file of a lock: it gets its name only if no other file has it, and shows signs of life.

A sign is a new modification time of the file. A thread of the owner sets it, so signs continue
while the owner loads, compiles or saves a model. The file stays open: if another file becomes the
lock, the signs of this thread do not count for it.

Without signs the lease of the lock expires. Ages are measured by the clock of the file system. A
lease only decides if nothing else shows whether the owner is alive
(zerotrain.machine.processes).
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from pathlib import Path

from zerotrain.machine.disk import time_there
from zerotrain.machine.disk_errors import DiskError, explain
from zerotrain.machine.regular_file import FileError, open_new, open_to_change, open_to_read

NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of a file system without hard links (link(2); ENOSYS: of FUSE)."""
LEASE_SECONDS = 120
"""Twelve signs: the thread is only later than that if its process or its machine was stopped."""
SIGN_SECONDS = 10.0
SIGNS_IN_LEASE = 6
"""Minimum number of signs in a lease, however short it is."""
CLOSE_SECONDS = 2.0


def give_name(draft: Path, place: Path) -> None:
    """Give a file a second name that no other file has.

    Without hard links the content is copied: the file at `place` is then empty for a moment.

    Args:
        draft: The complete file, under a name that is unique to this process.
        place: The second name.

    Raises:
        FileExistsError: another file has the name.
        DiskError: the file system fails.
    """
    try:
        # A hard link appears atomically with its content, and fails if the name exists.
        os.link(draft, place)
    except FileExistsError:
        # An NFS client without a reply retries: the link that it finds may be its own.
        with open_to_read(draft) as stream:
            if os.fstat(stream.fileno()).st_nlink != 2:
                raise
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise _sentence(error, place) from error
        try:
            _copy_new(draft, place)
        except (FileExistsError, FileError):
            raise
        except OSError as failed:
            raise _sentence(failed, place) from failed


def _copy_new(draft: Path, place: Path) -> None:
    with open_new(place, replace=False) as stream, open_to_read(draft) as source:
        stream.write(source.read())
        stream.flush()
        os.fsync(stream.fileno())
        try:
            own = os.path.samestat(os.fstat(stream.fileno()), place.stat())
        except FileNotFoundError:
            own = False
    if not own:  # it took so long that another process has removed the empty file
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(place))


def _sentence(error: OSError, place: Path) -> DiskError:
    named = OSError(error.errno, error.strerror, str(place))  # users do not know the draft's name
    return explain(named, place) or DiskError(
        f"{place}: cannot be written: {error.strerror}",
        hint="look at `dmesg` and at the mount of this disk; then run the same command again",
        errno=error.errno or 0,
    )


def sign_seconds(lease: float) -> float:
    """Return the seconds between two signs of an owner."""
    return min(SIGN_SECONDS, lease / SIGNS_IN_LEASE)


class SignsOfLife:
    """Thread that gives signs of life through a lock file until it is closed."""

    def __init__(self, file: Path, lease: float) -> None:
        self._file = open_to_change(file)
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
                self._file.close()

    def _run(self) -> None:
        while not self._closed.wait(self._every):
            self._sign()

    def _sign(self) -> None:
        with contextlib.suppress(OSError):  # a network disk that does not respond now
            os.utime(self._file.fileno())


def last_sign(file: Path) -> float | None:
    """Return the time of the last sign by the file system's clock; None: no such file.

    Raises:
        FileError: a link, a folder or a pipe has the name.
    """
    try:
        with open_to_read(file) as stream:  # opening it makes a network file system ask its server
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
