"""Whether the process that wrote a file is alive: its pid namespace, its lock, its last write.

Containers on one machine may share a host name, a disk and a pid; so may containers on several
machines. A network file system uses its server's clock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import tempfile
from functools import cache
from pathlib import Path
from typing import IO

from zerotrain.errors import PipelineError

MACHINE = 0xEFFFFFFC
"""Inode of a machine's initial namespace (linux/proc_ns.h, PROC_PID_INIT_INO)."""


@cache
def boot_id() -> str:
    """Read the kernel's id of the current boot; empty if there is no id."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def pid_namespace() -> int:
    """Return the inode of this process's PID namespace; 0 if it is unreadable."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def pid_space() -> str:
    """Return the name of the space in which pids are unique: the host, and a container's namespace.

    It has no dot and can be part of a file name.
    """
    host, found = socket.gethostname().replace(".", "_"), pid_namespace()
    return host if found in (0, MACHINE) else f"{host}+{boot_id()[:8]}{found:x}"


def open_lock(path: Path) -> IO[str]:
    """Open the file of a kernel lock, which is made if it is missing and is never changed.

    Raises:
        PipelineError: a link, a pipe or a device is in its place, in a folder from others.
        OSError: the file cannot be opened.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
        raise _no_file(path) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _no_file(path)
    return os.fdopen(descriptor, "r+")


def _no_file(path: Path) -> PipelineError:
    return PipelineError(
        f"{path}: is a link, or not a regular file, so it cannot be a lock",
        hint="move it to another place",
    )


def hold(path: Path) -> IO[str]:
    """Lock a file while this process lives and the returned stream is open.

    On a file system without locks this does nothing.

    Raises:
        OSError: the file cannot be opened.
    """
    stream = path.open("r+", encoding="utf-8")
    with contextlib.suppress(OSError):
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return stream


def is_held(path: Path) -> bool | None:
    """Return whether a live process holds a file; None if that cannot be determined."""
    try:
        with path.open("r+", encoding="utf-8") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def time_there(folder: Path) -> float:
    """Return the time that the folder's file system gives a file that changes now.

    File times are compared with it instead of this machine's clock, which may differ.

    Args:
        folder: An existing, writable folder.

    Returns:
        Seconds since the epoch.

    Raises:
        OSError: the folder is not writable.
    """
    with tempfile.TemporaryFile(dir=folder) as probe:
        os.utime(probe.fileno())
        return os.fstat(probe.fileno()).st_mtime
