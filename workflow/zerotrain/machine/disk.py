"""Whether a folder serves for what is swapped to a disk: there, writable, large enough, a disk."""

from __future__ import annotations

import os
import re
import shutil
import socket
import tempfile
from pathlib import Path

import psutil

from zerotrain.errors import PipelineError

IN_MEMORY = ("tmpfs", "ramfs")
SAMPLE = b"\0" * 4096
"""What is written to see whether writing works; a quota may let a file be made but not filled."""


VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")


def on_this_machine(text: str, key: str) -> Path:
    """A folder of the configuration, with the variables of this machine's environment.

    What stands below a variable is made where the variable's folder is there: a cluster gives each
    job an empty one. Nothing else is made: a disk that is not mounted would go unnoticed.

    Args:
        text: The folder, such as $TMPDIR/swap.
        key: The key that it is the value of.

    Raises:
        PipelineError: a variable is not set here.
    """
    for found in VARIABLE.finditer(text):
        name = found[1] or found[2]
        if not os.environ.get(name):
            raise PipelineError(
                f"{key} {text}: the variable {name} is not set on {socket.gethostname()}",
                hint=f"export {name} in the job's environment (profiles/slurm/job-environment.sh), "
                "or name a folder that every machine has",
            )
    folder = Path(os.path.expandvars(text))
    last = [*VARIABLE.finditer(text)][-1:]
    if last and Path(os.path.expandvars(text[: last[0].end()])).is_dir():
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def mount(folder: Path) -> tuple[str, str]:
    """Device and type of the file system under a folder."""
    path = folder.resolve()
    mounts = [m for m in psutil.disk_partitions(all=True) if path.is_relative_to(m.mountpoint)]
    best = max(mounts, key=lambda mount: len(mount.mountpoint), default=None)
    return (best.device, best.fstype) if best else (str(path.stat().st_dev), "unknown")


def try_writing(folder: Path) -> None:
    """Bring a small file to the disk in a folder, and remove it.

    Raises:
        OSError: nothing can be written there.
    """
    with tempfile.TemporaryFile(dir=folder) as stream:
        stream.write(SAMPLE)
        stream.flush()
        os.fsync(stream.fileno())


def write_trouble(folder: Path) -> str:
    """Why nothing can be written in a folder; empty where a small file reaches the disk."""
    try:
        try_writing(folder)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def check_folder(folder: Path, phase: str) -> None:
    """Refuse launch.offload_path of a phase where it cannot hold what is swapped.

    Raises:
        PipelineError: it is no folder, cannot be written, or lies in memory.
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


def check_space(folder: Path, phase: str, needed: int, why: str) -> None:
    """Refuse launch.offload_path of a phase where `needed` bytes do not fit.

    Args:
        folder: The folder.
        phase: Name of the phase.
        needed: Bytes that will be written.
        why: What they are made of, for the message.

    Raises:
        PipelineError: there is less free.
    """
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise PipelineError(
            f"phase {phase}: launch.offload_path {folder} has {size(free)} free, the phase "
            f"swaps {size(needed)} ({why})",
            hint="free some, name a folder on a larger disk, or use zero3_offload, which keeps it "
            "in memory",
        )


def size(count: int) -> str:
    """Bytes in words, as disks are sold: 46.2 GB."""
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
