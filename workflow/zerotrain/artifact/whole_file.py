"""Atomic writes of files: first next to their place, then renamed into it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from zerotrain.artifact.documents.limits import read_bytes
from zerotrain.artifact.leftovers import recover_interrupted_publish, temporary_path
from zerotrain.artifact.links import check_no_link_above
from zerotrain.errors import PipelineError
from zerotrain.machine.disk_errors import check_no_file, writing
from zerotrain.machine.regular_file import open_new, open_to_change, write_text

AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""Constants of renameat2(2)."""
NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)
"""What a kernel or a file system says that cannot exchange two names, as NFS cannot."""


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary file to write, which then replaces `path`.

    The former file stays until then, and also if the block raises; the temporary file and the
    folders that were created for it are then removed.

    Raises:
        PipelineError: a file is above it.
        DiskError: the disk is full or read-only, or fails.
    """
    check_no_file(path.parent)
    check_no_link_above(path)
    new = temporary_path(path, "new")
    with writing(path):
        made = [folder for folder in path.parents if not folder.exists()]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            recover_interrupted_publish(path)
            new.unlink(missing_ok=True)
            yield new
            sync(new)
            new.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)
                for folder in made:
                    folder.rmdir()
            raise


def write_whole(path: Path, text: str) -> None:
    """Write a text file as UTF-8, completely or not at all.

    Raises:
        DiskError: the disk is full or read-only, or fails; `path` is unchanged.
    """
    with replacing(path) as new:
        write_text(new, text)


def create(path: Path, text: str) -> None:
    """Write a new text file as UTF-8, completely or not at all; overwrite nothing.

    Raises:
        FileExistsError: the file exists already.
        DiskError: the disk is full or read-only, or fails.
    """
    with writing(path):
        new = temporary_path(path, "new")
        try:
            write_text(new, text)
            sync(new)
            try:
                os.link(new, path)
            except FileExistsError:
                raise
            except OSError:  # a file system without hard links
                open_new(path, replace=False).close()
                new.replace(path)
        finally:
            with contextlib.suppress(OSError):
                new.unlink()


def replace_file(file: Path, expected: bytes, new: bytes) -> bool:
    """Replace a file's bytes, if they still are what is expected.

    What an editor saves at the same moment is never lost: the two names are exchanged, and what was
    replaced is put back where it is not what was expected.

    Args:
        file: The file, or a link to it.
        expected: The bytes that it had when `new` was made of them.
        new: Its new bytes.

    Returns:
        Whether it has them; False if it had others than expected, which it keeps.

    Raises:
        DiskError: the file cannot be replaced; it is as it was.
    """
    target = file.resolve()
    draft = temporary_path(target, "new")
    with writing(file):
        try:
            _write_draft(draft, new, target)
            if read_bytes(target) != expected:
                return False
            if not _swap(draft, target):
                draft.replace(target)
                return True
            replaced, ours = read_bytes(draft), new
            if replaced == expected:
                return True
            while True:  # put it back; what was saved in between is newer, and stays
                _swap(draft, target)
                found = read_bytes(draft)
                if found == ours:
                    break
                ours, replaced = replaced, found
            return False
        finally:
            draft.unlink(missing_ok=True)


def check_replaceable(file: Path) -> None:
    """Check that `replace_file` can replace a file, and remove what killed processes left of it.

    Raises:
        DiskError: it cannot: the file or its folder is read-only, or the disk is full.
    """
    target = file.resolve()
    draft = temporary_path(target, "new")
    with writing(file):
        recover_interrupted_publish(target)
        if _is_mounted(target):
            raise PipelineError(
                f"{file}: is mounted by itself, and cannot be replaced",
                hint="mount its folder instead, and run the same command again",
            )
        open_to_change(target).close()  # refused for an immutable file, whose folder is not
        content = read_bytes(target)
        try:
            _write_draft(draft, content + bytes(4096), target)
        finally:
            draft.unlink(missing_ok=True)


def _is_mounted(target: Path) -> bool:
    """Return whether a file is a mount point itself, as containers are given single files."""
    name = str(target).replace(" ", "\\040")
    with contextlib.suppress(OSError):
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
        return any(line.split()[4] == name for line in mounts)
    return False


def _write_draft(draft: Path, content: bytes, target: Path) -> None:
    with open_new(draft) as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    shutil.copymode(target, draft)


def _swap(one: Path, other: Path) -> bool:
    """Exchange the files of two names in one step; False where the system cannot."""
    number = exchange(one, other)
    if number not in (0, *NO_EXCHANGE):
        raise OSError(number, os.strerror(number), str(other))
    return number == 0


def exchange(first: Path, second: Path) -> int:
    """Exchange the names of two files or folders; neither is missing at any moment.

    Returns:
        0, or the error number; nothing has changed then. ENOSYS if the system has no such call.
    """
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:  # another system, or an old C library
        return errno.ENOSYS
    names = os.fsencode(first), os.fsencode(second)
    done = renameat2(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE)
    return ctypes.get_errno() if done else 0


def sync(path: Path) -> None:
    """Flush a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
