"""Publishing a folder: written beside its place, hashed, and renamed when it is whole."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerotrain import __version__
from zerotrain.artifact.damage import MANIFEST, file_sha256
from zerotrain.artifact.leftovers import beside, mend
from zerotrain.artifact.manifest import FORMAT, Artifact, write_json
from zerotrain.artifact.whole_file import replacing, sync
from zerotrain.disk_errors import check_no_file, writing
from zerotrain.errors import PipelineError

NO_LINKS = (
    *(errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK),
    errno.ENOSYS,  # of FUSE, where the file system has no link()
)
"""Errors that say that a file can have no second name there."""
COPY_BYTES = 2**23


@dataclass
class Draft:
    """A folder being written. Set `content`; `files` not listed by hand are found and hashed."""

    folder: Path
    content: dict[str, Any] = field(default_factory=dict)
    known: dict[str, str] = field(default_factory=dict)
    """sha256 of files whose hash the writer already knows, by name: they are not read again."""


@contextlib.contextmanager
def publish(
    folder: Path,
    kind: str,
    *,
    parents: Mapping[str, Artifact] | None = None,
    made_by: Mapping[str, Any] | None = None,
) -> Iterator[Draft]:
    """Write an artifact folder: fill `draft.folder` and `draft.content` inside the with block.

    The folder appears whole, by a rename, when the block ends well; if it raises, nothing appears
    and what was there stays. A folder left by a killed process is mended by the next call.

    Raises:
        PipelineError: a file is in the folder's place or above it.
        DiskError: the disk is full, read-only, or fails.
    """
    with writing(folder):
        yield from _publish(folder, kind, parents, made_by)


def _publish(
    folder: Path,
    kind: str,
    parents: Mapping[str, Artifact] | None,
    made_by: Mapping[str, Any] | None,
) -> Iterator[Draft]:
    check_no_file(folder)
    mend(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    new = beside(folder, "new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    try:
        draft = Draft(new)
        yield draft
        # A manifest among files that were linked in would be written into where it came from.
        (new / MANIFEST).unlink(missing_ok=True)
        names = sorted(p.relative_to(new).as_posix() for p in new.rglob("*") if p.is_file())
        files = {
            name: {
                "sha256": draft.known.get(name) or file_sha256(new / name),
                "bytes": (new / name).stat().st_size,
            }
            for name in names
        }
        write_json(new / MANIFEST, _manifest(kind, draft.content, files, parents, made_by))
        _share(new, names)
        for name in [*files, MANIFEST]:
            sync(new / name)
        for directory in [p for p in new.rglob("*") if p.is_dir()]:
            sync(directory)
        sync(new)
        _swap_in(new, folder)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise


def publish_manifest(
    folder: Path,
    kind: str,
    content: dict[str, Any],
    *,
    parents: Mapping[str, Artifact] | None = None,
    made_by: Mapping[str, Any] | None = None,
) -> None:
    """Publish an artifact that is its manifest alone; other folders inside `folder` stay."""
    with replacing(folder / MANIFEST) as new:
        write_json(new, _manifest(kind, content, {}, parents, made_by))
    sync(folder)


def _manifest(
    kind: str,
    content: dict[str, Any],
    files: dict[str, dict[str, Any]],
    parents: Mapping[str, Artifact] | None,
    made_by: Mapping[str, Any] | None,
) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "kind": kind,
        "content": content,
        "files": files,
        "parents": {
            name: {"path": str(parent.folder), "identity": parent.identity}
            for name, parent in (parents or {}).items()
        },
        "made_by": {"zerotrain": __version__, **(made_by or {})},
    }


def _share(folder: Path, names: Iterable[str]) -> None:
    """Give files the mode of the manifest, a new file's: libraries leave theirs to the owner alone.

    Links, hard ones too, are left as they are: what they name may be a user's own file.
    """
    mode = stat.S_IMODE((folder / MANIFEST).stat().st_mode)
    for name in names:
        found = (folder / name).lstat()
        alone = stat.S_ISREG(found.st_mode) and found.st_nlink == 1
        if alone and stat.S_IMODE(found.st_mode) != mode:
            (folder / name).chmod(mode)


def link_or_copy(source: Path, target: Path) -> None:
    """Give a file a second name without a second copy where the file system can, else copy it.

    Args:
        source: The file; links are followed.
        target: A path that does not exist yet; its folders are made.

    Raises:
        PipelineError: the target exists, which is left as it is.
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


def copy_new(source: Path, target: Path) -> None:
    """Copy a file, its mode and its times to a path that does not exist yet.

    Raises:
        PipelineError: the target exists, which is left as it is.
        OSError: the file cannot be read or written; no part of a copy stays.
    """
    with source.open("rb") as reading:
        try:
            writing = target.open("xb")
        except FileExistsError as error:
            raise _exists(target) from error
        try:
            with writing:
                shutil.copyfileobj(reading, writing, COPY_BYTES)
            shutil.copystat(source, target)
        except BaseException:
            target.unlink(missing_ok=True)
            raise


def _exists(target: Path) -> PipelineError:
    return PipelineError(
        f"{target}: exists already, and nothing is overwritten",
        hint="move it away, or name another folder",
    )


def _swap_in(new: Path, folder: Path) -> None:
    old = beside(folder, "old")
    try:
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
        new.rename(folder)
    except BaseException:
        if old.exists() and not folder.exists():
            old.rename(folder)
        raise
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)
