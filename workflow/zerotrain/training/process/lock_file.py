"""The file of a lock: it gets its name only if no other file has it, on any file system."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from zerotrain.machine.disk_errors import DiskError, explain

NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of a file system without hard links (link(2); ENOSYS: of FUSE)."""


def give_name(draft: Path, place: Path) -> None:
    """Give a file a second name that no other file has.

    Without hard links the content is copied: the file at `place` is then empty for a moment.

    Args:
        draft: The complete file, under a name that is unique to this process.
        place: The second name.

    Raises:
        FileExistsError: another file has the name.
        DiskError: the file system fails.
    """
    try:
        # A hard link appears atomically with its content, and fails if the name exists.
        os.link(draft, place)
    except FileExistsError:
        # An NFS client without a reply retries: the link that it finds may be its own.
        with draft.open("rb") as stream:
            if os.fstat(stream.fileno()).st_nlink != 2:
                raise
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise _sentence(error, place) from error
        try:
            _copy_new(draft, place)
        except FileExistsError:
            raise
        except OSError as failed:
            raise _sentence(failed, place) from failed


def _copy_new(draft: Path, place: Path) -> None:
    with place.open("x") as stream:
        stream.write(draft.read_text())
        stream.flush()
        os.fsync(stream.fileno())
        try:
            own = os.path.samestat(os.fstat(stream.fileno()), place.stat())
        except FileNotFoundError:
            own = False
    if not own:  # it took so long that another process has removed the empty file
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(place))


def _sentence(error: OSError, place: Path) -> DiskError:
    named = OSError(error.errno, error.strerror, str(place))  # users do not know the draft's name
    return explain(named, place) or DiskError(
        f"{place}: cannot be written: {error.strerror}",
        hint="look at `dmesg` and at the mount of this disk; then run the same command again",
        errno=error.errno or 0,
    )
