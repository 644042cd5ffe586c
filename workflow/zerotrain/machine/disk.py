"""Checks that a folder can hold swapped data: it exists, is writable, large enough, on a disk."""

from __future__ import annotations

import os
import re
import socket
import tempfile
from pathlib import Path

import psutil

from zerotrain.errors import PipelineError

IN_MEMORY = ("tmpfs", "ramfs")
SAMPLE = b"\0" * 4096
"""Data of a test write; a quota may allow a file to be created but not filled."""


VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")


def on_this_machine(text: str) -> Path:
    """Expand the variables in launch.offload_path, by this machine's environment.

    Folders below a variable's folder are created if that folder exists: a cluster gives each job an
    empty one. Nothing else is created: a disk that is not mounted would go unnoticed.

    Args:
        text: The folder, such as $TMPDIR/swap.

    Raises:
        PipelineError: a variable is not set here.
    """
    for found in VARIABLE.finditer(text):
        name = found[1] or found[2]
        if not os.environ.get(name):
            raise PipelineError(
                f"launch.offload_path {text}: the variable {name} is not set on "
                f"{socket.gethostname()}",
                hint=f"export {name} in the job's environment (profiles/slurm/job-environment.sh), "
                "or name a folder that every machine has",
            )
    folder = Path(os.path.expandvars(text))
    last = [*VARIABLE.finditer(text)][-1:]
    if last and Path(os.path.expandvars(text[: last[0].end()])).is_dir():
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def mount(folder: Path) -> tuple[str, str]:
    """Return device and type of the file system that holds a folder."""
    path = folder.resolve()
    mounts = [m for m in psutil.disk_partitions(all=True) if path.is_relative_to(m.mountpoint)]
    best = max(mounts, key=lambda mount: len(mount.mountpoint), default=None)
    return (best.device, best.fstype) if best else (str(path.stat().st_dev), "unknown")


def try_writing(folder: Path) -> None:
    """Write a small file in a folder, flush it to disk and remove it.

    Raises:
        OSError: the folder is not writable.
    """
    with tempfile.TemporaryFile(dir=folder) as stream:
        stream.write(SAMPLE)
        stream.flush()
        os.fsync(stream.fileno())


def write_trouble(folder: Path) -> str:
    """Return why a folder is not writable; empty if a small file reaches the disk."""
    try:
        try_writing(folder)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def check_folder(folder: Path, phase: str) -> None:
    """Check that launch.offload_path of a phase can hold swapped data.

    Raises:
        PipelineError: it is not a folder, is not writable, or is in memory.
    """
    if not folder.is_dir():
        raise PipelineError(
            f"phase {phase}: launch.offload_path {folder} is "
            f"{'a file' if folder.exists() else 'no folder'} on this machine",
            hint="name a folder on a local NVMe disk, or make it: "
            f"`mkdir -p {folder}` (it is not made for you: a disk that is not mounted would go "
            "unnoticed)",
        )
    if trouble := write_trouble(folder):
        raise PipelineError(
            f"phase {phase}: launch.offload_path {folder} cannot be written: {trouble}",
            hint="give this user the right to write there, or name another folder",
        )
    _, kind = mount(folder)
    if kind in IN_MEMORY:
        raise PipelineError(
            f"phase {phase}: launch.offload_path {folder} is memory, no disk ({kind})",
            hint="name a folder on a local NVMe disk; to keep it in memory, zero3_offload does so "
            "without the detour",
        )


def size(count: int) -> str:
    """Format bytes with decimal units, as for disks: 46.2 GB."""
    if count < 1e5:
        return f"{count / 1e3:.1f} kB"
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


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
