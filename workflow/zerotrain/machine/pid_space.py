"""The space in which a process's pid is valid: a boot of a machine, and a PID namespace of it."""

from __future__ import annotations

import os
import socket
from functools import cache
from pathlib import Path

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
