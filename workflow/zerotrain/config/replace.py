"""Give a file new bytes at once, unless another program has changed it in the meantime."""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import suppress
from pathlib import Path

from zerotrain.artifact.documents import read_bytes
from zerotrain.artifact.leftovers import recover_interrupted_publish, temporary_path
from zerotrain.artifact.whole_file import exchange
from zerotrain.errors import PipelineError
from zerotrain.machine.disk_errors import writing
from zerotrain.machine.regular_file import open_new, open_to_change

NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)
"""What a kernel or a file system says that cannot exchange two names, as NFS cannot."""


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
            _write(draft, new, target)
            if read_bytes(target) != expected:
                return False
            if not _exchange(draft, target):
                draft.replace(target)
                return True
            replaced, ours = read_bytes(draft), new
            if replaced == expected:
                return True
            while True:  # put it back; what was saved in between is newer, and stays
                _exchange(draft, target)
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
            _write(draft, content + bytes(4096), target)
        finally:
            draft.unlink(missing_ok=True)


def _is_mounted(target: Path) -> bool:
    """Return whether a file is a mount point itself, as containers are given single files."""
    name = str(target).replace(" ", "\\040")
    with suppress(OSError):
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
        return any(line.split()[4] == name for line in mounts)
    return False


def _write(draft: Path, content: bytes, target: Path) -> None:
    with open_new(draft) as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    shutil.copymode(target, draft)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange the files of two names in one step; False where the system cannot."""
    number = exchange(one, other)
    if number not in (0, *NO_EXCHANGE):
        raise OSError(number, os.strerror(number), str(other))
    return number == 0
