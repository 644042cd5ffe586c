"""A second name of a file: a hard link for this project's files, a copy for others.

A hard link shares its content, so a library that overwrites a file in place changes it under every
name. The user's files and the hub's cache get none: their copies share blocks at most.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from zerotrain.artifact.damage import file_sha256
from zerotrain.artifact.layout import place_in_results
from zerotrain.artifact.manifest import find_lister
from zerotrain.artifact.verdicts import remembering
from zerotrain.errors import PipelineError
from zerotrain.machine.regular_file import open_new, open_to_read

NO_LINKS = (
    *(errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK),
    errno.ENOSYS,  # of FUSE, if the file system has no link()
)
"""Errors that mean that a file cannot have a second name there."""
COPY_BYTES = 2**23
FICLONE = 0x40049409
"""Linux's request to let a new file share another file's blocks (btrfs, XFS, ZFS)."""


def link_or_copy(source: Path, target: Path) -> None:
    """Create a hard link to a file of this project if the file system can, else a copy.

    Args:
        source: The file; links are followed.
        target: A path that does not exist yet; its folders are created.

    Raises:
        PipelineError: the target exists; it is unchanged.
        OSError: the disk is full or read-only, or the source cannot be read.
    """
    source = source.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except FileExistsError as error:
        raise _exists(target) from error
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        copy_new(source, target)


def copy_new(source: Path, target: Path, *, only_share: bool = False) -> None:
    """Copy a file, its mode and its times to a path that does not exist yet.

    If the file system can, the copy shares blocks with the file until one of them changes.

    Args:
        source: The file; links are followed.
        target: The path.
        only_share: Whether to refuse a copy that takes additional space.

    Raises:
        PipelineError: the target exists and is unchanged, or blocks cannot be shared.
        OSError: the file cannot be read or written; no partial copy remains.
    """
    with open_to_read(source, follow_links=True) as reading:
        try:
            writing = open_new(target, replace=False)
        except FileExistsError as error:
            raise _exists(target) from error
        try:
            with writing:
                if not reflink(reading.fileno(), writing.fileno()):
                    if only_share:
                        raise PipelineError(
                            f"{target}: the file system cannot share the blocks of {source}",
                            hint="base_copy: copy takes room of its own, base_copy: link none",
                        )
                    shutil.copyfileobj(reading, writing, COPY_BYTES)
            shutil.copystat(source, target)
        except BaseException:
            target.unlink(missing_ok=True)
            raise


def reflink(source: int, target: int) -> bool:
    """Let an empty file share all blocks of another; return whether the file system can.

    Args:
        source: Descriptor of the file.
        target: Descriptor of the empty file, open for writing.
    """
    try:
        fcntl.ioctl(target, FICLONE, source)
    except OSError:
        return False
    return True


def is_own(path: Path) -> bool:
    """Return whether this project's workflow made a file; links are followed."""
    try:
        folder = find_lister(path.resolve())
    except PipelineError:  # another program's manifest.json
        return False
    return folder is not None and place_in_results(folder) is not None


def take_in(source: Path, target: Path, sha256: str | None, others: Iterable[Path]) -> None:
    """Add the content of a user's file to a folder of this project, with one shared copy.

    Args:
        source: The file; links are followed.
        target: A path that does not exist yet; its folders are created.
        sha256: The sha256 of the content, if known.
        others: Files of this project that may have the same content.

    Raises:
        PipelineError: the target exists; it is unchanged.
        OSError: the file cannot be read or written.
    """
    source = source.resolve()
    other = next((other for other in others if _is_copy(other, source, sha256)), None)
    if other is not None:
        link_or_copy(other, target)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        copy_new(source, target)


def _is_copy(path: Path, source: Path, sha256: str | None) -> bool:
    """Return whether a file has the source's content, but is not the source under another name."""
    hashed = remembering(file_sha256)
    try:
        if path.is_symlink() or path.samefile(source):
            return False
        if path.stat().st_size != source.stat().st_size:
            return False
        return hashed(path) == (sha256 or hashed(source))
    except OSError:
        return False


def _exists(target: Path) -> PipelineError:
    return PipelineError(
        f"{target}: exists already, and nothing is overwritten",
        hint="move it away, or name another folder",
    )
