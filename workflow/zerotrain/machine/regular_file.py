"""Opening of regular files: the one place where a path becomes an open file.

Folders are exchanged, and a hostile one has links, pipes and devices where files should be: a link
would be written through, a pipe waits for ever, a device never ends. A file is therefore opened
without waiting (O_NONBLOCK), without its last link (O_NOFOLLOW), and checked once it is open.
`make lint` refuses other ways to open or to write one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from io import BufferedReader, BufferedWriter, FileIO
from pathlib import Path
from typing import IO, Any, TextIO, cast

from zerotrain.errors import PipelineError

SPECIAL = (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENOTDIR, errno.EMLINK)
"""Errors of open(2) where a link, a folder, a pipe or a socket is in a file's place."""
KINDS = {
    stat.S_IFLNK: "a link",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}
MISSING = "check the name and the folder"
REFUSED = "remove it if you do not know who made it, or put a file in its place"


class FileError(PipelineError, OSError):
    """A file that cannot be opened; `errno` is the system's, `strerror` the end of the message."""

    def __init__(self, path: Path, why: str, *, hint: str, errno: int) -> None:
        PipelineError.__init__(self, f"{path}: {why}", hint=hint)
        self.errno, self.strerror, self.filename = errno, why, str(path)


class MissingFileError(FileError, FileNotFoundError):
    """No file has the name."""


def open_to_read(path: Path, *, follow_links: bool = False) -> BufferedReader:
    """Open a file that may be from others.

    Args:
        path: The file.
        follow_links: Whether a link is followed, as for files that the user names and for those of
            the hub's cache. Folders above the file are followed in any case.

    Raises:
        MissingFileError: there is no such file.
        FileError: a link, a folder, a pipe or a device has the name, or it cannot be read.
    """
    flags = os.O_RDONLY | (0 if follow_links else os.O_NOFOLLOW)
    return cast(BufferedReader, _stream(path, "rb", flags))


def open_new(path: Path, *, replace: bool = True) -> BufferedWriter:
    """Open a new file to write; no link is followed.

    Args:
        path: The file.
        replace: Whether what has the name is removed first.

    Raises:
        FileError: a folder has the name.
        FileExistsError: a file has the name, and stays.
        OSError: the disk is full or read-only, or fails.
    """
    if replace:
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):
            path.unlink()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    return cast(BufferedWriter, _stream(path, "wb", flags))


def open_to_append(path: Path) -> FileIO:
    """Open a file to append, unbuffered; it is made if it is missing. No link is followed.

    Raises:
        FileError: a link, a folder, a pipe or a device has the name.
        OSError: the disk is full or read-only, or fails.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
    return cast(FileIO, _stream(path, "ab", flags, buffering=0))


def open_to_change(path: Path, *, make: bool = False) -> IO[str]:
    """Open a text file to read and write, as the file of a lock; no link is followed.

    Args:
        path: The file.
        make: Whether it is made if it is missing.

    Raises:
        FileError: a link, a folder, a pipe or a device has the name.
        OSError: the file cannot be opened.
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT if make else 0)
    return cast(TextIO, _stream(path, "r+", flags, encoding="utf-8"))


def touch(path: Path) -> None:
    """Make an empty file, or leave the one that is there; no link is followed.

    Raises:
        FileError: a link, a folder, a pipe or a device has the name.
        OSError: the disk is full or read-only, or fails.
    """
    _stream(path, "ab", os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW).close()


def write_bytes(path: Path, data: bytes) -> None:
    """Write a new file, which replaces what has the name; see open_new."""
    with open_new(path) as stream:
        stream.write(data)


def write_text(path: Path, text: str) -> None:
    """Write a new text file as UTF-8, which replaces what has the name; see open_new."""
    write_bytes(path, text.encode("utf-8"))


def _stream(path: Path, mode: str, flags: int, **how: Any) -> IO[Any]:
    """Open a stream that has the file's name."""
    try:
        return open(path, mode, opener=lambda name, _: _open(Path(name), flags), **how)
    except ValueError as error:
        raise FileError(
            path, f"is no name of a file: {error}", hint="correct the name", errno=errno.EINVAL
        ) from error


def _open(path: Path, flags: int) -> int:
    try:
        handle = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if (found := _explain(path, error, flags)) is None:
            raise
        try:
            raise found from error
        finally:
            del found  # with its traceback it would keep what its callers hold, such as locks
    if stat.S_ISREG(kind := os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    raise _special(path, kind)


def _explain(path: Path, error: OSError, flags: int) -> FileError | None:
    """Return the sentence for what open(2) says; None: the disk's own error is explained later."""
    if error.errno in SPECIAL or (error.errno == errno.EEXIST and path.is_dir()):
        with contextlib.suppress(OSError):
            if not stat.S_ISREG(mode := os.lstat(path).st_mode):
                return _special(path, mode)
    if error.errno in (errno.ENOENT, errno.ENOTDIR) and not flags & os.O_CREAT:
        return MissingFileError(path, "no such file", hint=MISSING, errno=error.errno)
    if error.errno == errno.ENAMETOOLONG:
        return FileError(path, "its name is too long", hint="shorten it", errno=error.errno)
    return None


def _special(path: Path, mode: int) -> FileError:
    what = KINDS.get(stat.S_IFMT(mode), "a device")
    number = errno.ELOOP if stat.S_ISLNK(mode) else errno.EINVAL
    return FileError(path, f"is {what}, not a file", hint=REFUSED, errno=number)


def make_folder(path: Path) -> None:
    """Make a folder and those above it, or leave the one that is there; it may be no link.

    Raises:
        FileError: a link, a file or a pipe has the name.
        OSError: the disk is full or read-only, or fails.
    """
    with contextlib.suppress(FileExistsError):
        path.mkdir(parents=True, exist_ok=True)
    if not stat.S_ISDIR(mode := os.lstat(path).st_mode):
        what = KINDS.get(stat.S_IFMT(mode), "a file")
        hint = "remove it if you do not know who made it, or put a folder in its place"
        raise FileError(path, f"is {what}, not a folder", hint=hint, errno=errno.ENOTDIR)
