"""Disk errors as sentences: full, over quota, read-only, without permission, failing.

Only these system errors are handled, and the forms that libraries give them: safetensors, torch and
pyarrow raise other classes. Every other error keeps its traceback.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from zerotrain.errors import PipelineError
from zerotrain.machine.disk import size, try_writing

FULL = (errno.ENOSPC, errno.EDQUOT)
FREE_SOME = "free some there, or work in a folder on a larger disk"
PERMISSION = "give this user the right to it, or name a folder of yours"
HINTS = {
    errno.ENOSPC: FREE_SOME,
    errno.EDQUOT: FREE_SOME + ", or ask for a larger quota",
    errno.EFBIG: "see `ulimit -f` and the largest file that this file system can hold",
    errno.EROFS: "mount it for writing, or name a folder on another disk",
    errno.EACCES: PERMISSION,
    errno.EPERM: PERMISSION + " (`chattr -i` where `lsattr` shows it as immutable)",
    errno.EIO: "the disk or its connection fails: look at `dmesg`",
    errno.ENAMETOOLONG: "choose a shorter name",
}
"""What to do, by error. These errors become sentences, all others do not."""
WITHOUT_PATH = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""Errors that only a disk has, so that they need no path; `write` names none."""
LOW_BYTES = 16 << 20
"""A file system with less free space may be the full one, if the error names none."""
NO_TEMPORARY_FOLDER = "No usable temporary directory found"


class DiskError(PipelineError):
    """A disk error; `errno` is the system's number."""

    def __init__(self, what: str, *, hint: str, errno: int) -> None:
        super().__init__(what, hint=hint)
        self.errno = errno


@contextlib.contextmanager
def writing(place: Path) -> Iterator[None]:
    """Name `place` in disk errors from the block, which writes it.

    Raises:
        DiskError: the disk is full or read-only, or fails.
    """
    try:
        yield
    except Exception as error:
        if (found := explain(error, place)) is None:
            raise
        raise found from error


def check_writable(folder: Path) -> None:
    """Check that a folder is writable, before work is done for it.

    Nothing is created: if the folder is missing, its nearest existing parent is checked.

    Raises:
        PipelineError: a file is in its place or above it.
        DiskError: the folder is not writable.
    """
    check_no_file(folder)
    with writing(folder):
        try_writing(_existing(folder))


def check_room(folder: Path) -> None:
    """Raise an error if a folder's disk explains a failed write.

    Raises:
        DiskError: the folder is not writable, or almost no space is free.
    """
    check_writable(folder)
    with writing(folder):
        if shutil.disk_usage(_existing(folder)).free < LOW_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


def check_no_file(folder: Path) -> None:
    """Check that a folder exists or can be created: that no file is in its place or above it.

    Raises:
        PipelineError: a file is in the way; the message names it.
        DiskError: the folders above it cannot be read.
    """
    with writing(folder):
        found = next(one for one in (folder, *folder.parents, Path()) if os.path.lexists(one))
        if found.is_dir():
            return
        what = "a file" if found.exists() else "a link to what is missing"
    raise PipelineError(
        f"{found}: is {what}, not a folder", hint="name a new folder, or move what is there"
    )


def explain(error: BaseException, place: Path | None = None) -> DiskError | None:
    """Return a sentence for a disk error; None for any other error.

    Args:
        error: The error, raised by the system or by a library that wraps it.
        place: The place that was being written, if known.
    """
    if NO_TEMPORARY_FOLDER in str(error):
        return DiskError(
            f"no temporary file can be written{str(error).partition(NO_TEMPORARY_FOLDER)[2]}",
            hint="free some there, or set TMPDIR to a folder on another disk",
            errno=errno.ENOSPC,
        )
    number = find_errno(error)
    if number is None:
        return None
    path = _path_of(error)
    if place is not None and (path is None or _is_near(path, place)):
        path = place
    if path is None and number not in WITHOUT_PATH:
        return None
    trouble = os.strerror(number)
    if path is None:
        return DiskError(
            f"a file cannot be written: {trouble}{_full_disks()}",
            hint=f"{HINTS[number]}; then run the same command again",
            errno=number,
        )
    if path == place or number in WITHOUT_PATH:
        what = f"{path}: cannot be written: {trouble}{_room(path) if number in FULL else ''}"
    else:
        what = f"{path}: can be neither read nor written: {trouble}"
    return DiskError(
        what,
        hint=f"{HINTS[number]}; then run the same command again",
        errno=number,
    )


def find_errno(error: BaseException) -> int | None:
    """Return the disk's error number that an exception represents, or was raised from."""
    if isinstance(error, PipelineError):
        return None
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno if error.errno in HINTS else None
    text = str(error)
    if isinstance(error, shutil.Error) or type(error).__name__ == "SafetensorError":
        found = re.search(r"\[Errno (\d+)\]|\(os error (\d+)\)", text)
        number = int(found[1] or found[2]) if found else None
        return number if number in HINTS else None
    if isinstance(error, RuntimeError):
        # torch has only the system's message; its zip writer only detects that a write was short.
        if "iostream error" in text or ("inline_container" in text and "unexpected pos" in text):
            return errno.ENOSPC
        named = re.search(r"(?:strerror: |failed with (?!strerror))(.+?)(?: ?\(|$)", text)
        return next((one for one in HINTS if named and named[1] == os.strerror(one)), None)
    return find_errno(error.__cause__) if error.__cause__ else None


def _path_of(error: BaseException) -> Path | None:
    """Return the file that an exception names; for a copy, the destination."""
    if isinstance(error, OSError) and (name := error.filename2 or error.filename):
        return Path(os.fsdecode(name)) if isinstance(name, str | bytes) else None
    if type(error).__name__ == "SafetensorError":
        found = re.search(r'at path "(.+)"', str(error))
        return Path(found[1]) if found else None
    if error.__cause__ and not isinstance(error, OSError):
        return _path_of(error.__cause__)
    return None


def _is_near(path: Path, place: Path) -> bool:
    """Return whether a file is `place`, above it, below it, or a temporary file next to it."""
    path, place = path.absolute(), place.absolute()
    if place.is_relative_to(path):
        return True
    if not path.is_relative_to(place.parent):
        return False
    first = path.relative_to(place.parent).parts[0]
    return first == place.name or first.startswith(".")


def _existing(path: Path) -> Path:
    return next(one for one in (path, *path.absolute().parents) if one.is_dir())


def _room(path: Path) -> str:
    """Return the free space on the disk of a path, in brackets."""
    folder = _existing(path)
    found = os.statvfs(folder)
    if found.f_files and not found.f_favail:
        return f" (no more files can be made on the disk of {folder})"
    free = size(found.f_bavail * found.f_frsize)
    return f" ({free} are free on the disk of {folder}, which is not enough)"


def _full_disks() -> str:
    """Return the disks that may be full, for errors that name none."""
    folders = {Path.cwd(), Path.home(), *map(Path, [os.getenv("TMPDIR") or "/tmp", "/dev/shm"])}
    seen: dict[int, Path] = {}
    for folder in sorted(folder for folder in folders if folder.is_dir()):
        seen.setdefault(folder.stat().st_dev, folder)
    low = [_room(folder) for folder in seen.values() if shutil.disk_usage(folder).free < LOW_BYTES]
    return "".join(low[:1])
