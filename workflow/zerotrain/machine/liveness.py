"""Whether the process that wrote a file is alive: its pid namespace, its lock, its last write.

Containers on one machine may share a host name, a disk and a pid; so may containers on several
machines. A network file system uses its server's clock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import tempfile
from functools import cache
from pathlib import Path
from typing import IO, Annotated

from annotated_types import Ge, Gt, Lt

from zerotrain.machine.regular_file import open_to_change

Pid = Annotated[int, Gt(0), Lt(2**31)]
"""A process in a record: kill(2) takes 0 and negative numbers for groups of processes."""
Number = Annotated[int, Ge(0), Lt(2**31)]
"""A rank or a count in a record."""
Seconds = Annotated[float, Ge(0), Lt(2**33)]
"""A time that the calendar has, or a duration, in a record."""
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


def hold(path: Path) -> IO[str]:
    """Lock a file while this process lives and the returned stream is open.

    On a file system without locks this does nothing.

    Raises:
        FileError: it is missing, or is a link, a folder, a pipe or a device.
        OSError: the file cannot be opened.
    """
    stream = open_to_change(path)
    with contextlib.suppress(OSError):
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return stream


def is_held(path: Path) -> bool | None:
    """Return whether a live process holds a file; None if that cannot be determined."""
    try:
        with open_to_change(path) as stream:
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
