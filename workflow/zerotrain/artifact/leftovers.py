"""Folders that a process writes or reads: temporary ones, recovery after a kill, no removal in use.

Snakemake removes a job's manifest.json before the job runs, and again if it fails. Its second name
in the folder, `.manifest.json`, keeps what is published: a failed job loses nothing.

The name identifies the writer: .<name>.new-<host>-<pid>, and .old- during an exchange, if the file
system cannot exchange names atomically. Whether a writer on another host or in another container is
alive cannot be determined; its last write is used instead, by the clock of the file system.

A reader holds a shared kernel lock on the manifest. A folder that is being made again has no
manifest, and is replaced at the end: its writers lock the folder above it. A lock ends with its
process. On a file system without such locks nothing is protected, and nothing waits.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from zerotrain.artifact.damage import MANIFEST
from zerotrain.artifact.documents import read_bytes
from zerotrain.machine.disk import time_there
from zerotrain.machine.file_lock import lock_stream
from zerotrain.machine.pid_space import pid_space
from zerotrain.machine.processes import started_before
from zerotrain.machine.regular_file import FileError, open_to_change, open_to_read, write_bytes

KEPT_MANIFEST = f".{MANIFEST}"
HOST = pid_space()
SILENT_SECONDS = {"new": 24 * 3600.0, "old": 60.0}
"""Seconds after which a writer of another host counts as ended: hashing and copying a model takes
hours at most, the exchange of two names a moment."""


def temporary_path(path: Path, kind: str) -> Path:
    """Return the path where this process writes a file or folder before it replaces `path` (kind
    `new`), or moves the former one (`old`)."""
    return path.with_name(f".{path.name}.{kind}-{HOST}-{os.getpid()}")


def recover_interrupted_publish(folder: Path, *, alone: bool = False) -> None:
    """Clean up after a killed writer next to the folder: restore the old one, remove the new.

    Args:
        folder: The published folder, or its future place.
        alone: Whether a lock guarantees that no process of another host writes here.
    """
    if not folder.parent.is_dir():
        return
    if not (folder / MANIFEST).exists() and (folder / KEPT_MANIFEST).exists():
        with contextlib.suppress(OSError):  # the folder is not writable, or another reader did it
            replace_by_link(folder / KEPT_MANIFEST, folder / MANIFEST)
    name = glob.escape(folder.name)
    for old in folder.parent.glob(f".{name}.old-*"):
        if _writer_lives(old, "old", alone):
            continue
        # Several readers may recover at once, and without write permission recovery is skipped.
        with contextlib.suppress(OSError):
            folder.rmdir()  # an empty folder, as Snakemake creates before a job
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                old.rename(folder)
    for new in folder.parent.glob(f".{name}.new-*"):
        if _writer_lives(new, "new", alone):
            continue
        if new.is_dir():
            shutil.rmtree(new, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                new.unlink()


def keep_manifest(folder: Path) -> None:
    """Give the manifest of a published folder its second name."""
    replace_by_link(folder / MANIFEST, folder / KEPT_MANIFEST)


def is_kept(folder: Path) -> bool:
    """Return whether the second name of a folder's manifest has the content of the first."""
    manifest, second = folder / MANIFEST, folder / KEPT_MANIFEST
    if not second.is_file():
        return False
    return manifest.samefile(second) or read_bytes(manifest) == read_bytes(second)


def remove_manifest(folder: Path) -> None:
    """Mark a folder as unfinished: neither name of its manifest is left."""
    for name in (MANIFEST, KEPT_MANIFEST):
        (folder / name).unlink(missing_ok=True)


def replace_by_link(source: Path, target: Path) -> None:
    """Replace a file by a second name of another one, or by a copy where there are no links."""
    draft = temporary_path(target, "new")
    draft.unlink(missing_ok=True)
    try:
        os.link(source, draft)
    except OSError:
        write_bytes(draft, read_bytes(source))
    draft.replace(target)
    draft.unlink(missing_ok=True)  # a rename onto the same file does nothing


@contextlib.contextmanager
def scratch_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder next to `path`, and remove it when the block ends.

    Leftovers of killed processes are removed first.
    """
    recover_interrupted_publish(path)
    folder = temporary_path(path, "new")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _writer_lives(leftover: Path, kind: str, alone: bool) -> bool:
    """Return whether the process in the name is alive and wrote it; its pid may be reused."""
    host, _, pid = leftover.name.rpartition(f".{kind}-")[2].rpartition("-")
    if alone and host not in ("", HOST):
        return False
    try:
        written = max(path.lstat().st_ctime for path in (leftover, *leftover.rglob("*")))
        age = time_there(leftover.parent) - written
        if host not in ("", HOST):
            return age < SILENT_SECONDS[kind]
        # Boot time, and some disks' times, have a resolution of whole seconds: allow for 5.
        return started_before(int(pid), age - 5)
    except (ValueError, FileNotFoundError):
        return False
    except OSError:  # not writable, so not removable either
        return True


REMOVED = ".removed"


def hold(folder: Path) -> IO[Any] | None:
    """Protect a folder from removal while the returned file is open."""
    try:
        stream = open_to_read(folder / MANIFEST)
    except OSError:
        return None  # reading it reports the error
    lock_stream(stream, shared=True, wait=True)
    return stream


def is_held(folder: Path) -> bool:
    """Return whether a process protects a published folder from removal."""
    with contextlib.suppress(FileError), open_to_read(folder / MANIFEST) as stream:
        return lock_stream(stream) is False
    return False


class WriterLock:
    """A claim of this process to write a folder, until `release` or the end of the process.

    Several writers may share it; a process in `without_writers` is waited for.
    """

    def __init__(self, folder: Path) -> None:
        self._place: int | None = None
        with contextlib.suppress(FileNotFoundError):
            self._place = os.open(folder.parent, os.O_RDONLY | os.O_DIRECTORY)
            lock_stream(self._place, shared=True, wait=True)

    def release(self) -> None:
        """Give up the claim."""
        if self._place is not None:
            os.close(self._place)
            self._place = None

    __del__ = release


@contextlib.contextmanager
def without_writers(folder: Path) -> Iterator[bool]:
    """Keep writers of a folder and its neighbours waiting; yield False if one is at work."""
    place = os.open(folder.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield lock_stream(place) is not False
    finally:
        os.close(place)


def remove(folder: Path) -> bool:
    """Remove a published folder, unless a process holds it; return whether it is gone.

    Raises:
        FileError: its manifest is missing, or is a link, a folder or a pipe.
        OSError: it cannot be removed.
    """
    # Network file systems lock only files that are open for writing.
    with open_to_change(folder / MANIFEST) as stream:
        if lock_stream(stream) is False:
            return False
        # Under this name it no longer counts, even if the removal is interrupted.
        removed = folder.with_name(f".{folder.name}{REMOVED}")
        if removed.exists():
            shutil.rmtree(removed)
        folder.rename(removed)
    shutil.rmtree(removed)
    return True
