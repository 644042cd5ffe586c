"""Publication of a folder: written next to its place, hashed, and renamed when it is complete.

A second name of a file is a hard link for this project's files, a copy for others: a hard link
shares its content, so a library that overwrites a file in place changes it under every name. The
user's files and the hub's cache get none: their copies share blocks at most.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerotrain import __version__
from zerotrain.artifact.damage import MANIFEST, file_sha256
from zerotrain.artifact.layout import place_in_results
from zerotrain.artifact.leftovers import (
    KEPT_MANIFEST,
    keep_manifest,
    recover_interrupted_publish,
    temporary_path,
)
from zerotrain.artifact.links import check_no_link_above
from zerotrain.artifact.manifest import FORMAT, Artifact, find_lister, write_json
from zerotrain.artifact.recipe import Recipe
from zerotrain.artifact.verdicts import remembering
from zerotrain.artifact.whole_file import exchange, replacing, sync
from zerotrain.errors import PipelineError
from zerotrain.machine.disk_errors import check_no_file, writing
from zerotrain.machine.regular_file import open_new, open_to_read


@dataclass
class UnpublishedFolder:
    """A folder being written. Set `content`; its files are found and hashed."""

    folder: Path
    content: dict[str, Any] = field(default_factory=dict)
    known: dict[str, str] = field(default_factory=dict)
    """sha256 of files that the writer has hashed already, by name: they are not read again."""
    unlisted: frozenset[str] = frozenset()
    """Names of folders directly inside whose files are no part of the artifact."""


@contextlib.contextmanager
def publish(
    folder: Path,
    kind: str,
    *,
    parents: Mapping[str, Artifact] | None = None,
    made_by: Mapping[str, Any] | None = None,
    recipe: Recipe | None = None,
) -> Iterator[UnpublishedFolder]:
    """Write an artifact folder: fill `draft.folder` and `draft.content` inside the with block.

    The folder appears complete, by a rename, when the block ends without an error; if it raises,
    nothing appears and the former folder stays. The next call cleans up after a killed process.

    Args:
        folder: The artifact's folder.
        kind: Its kind.
        parents: The artifacts that it is made from, by name.
        made_by: Facts about its maker, no part of its identity.
        recipe: What a rule's stage made it from.

    Raises:
        PipelineError: a file is at the folder's place or above it.
        DiskError: the disk is full or read-only, or fails.
    """
    with writing(folder):
        yield from _publish(folder, kind, parents, made_by, recipe)


def _publish(
    folder: Path,
    kind: str,
    parents: Mapping[str, Artifact] | None,
    made_by: Mapping[str, Any] | None,
    recipe: Recipe | None,
) -> Iterator[UnpublishedFolder]:
    check_no_file(folder)
    check_no_link_above(folder)
    recover_interrupted_publish(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    new = temporary_path(folder, "new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    try:
        draft = UnpublishedFolder(new)
        yield draft
        # If linked files include a manifest, writing through it would change its source.
        for name in (MANIFEST, KEPT_MANIFEST):
            (new / name).unlink(missing_ok=True)
        found = sorted(p.relative_to(new).as_posix() for p in new.rglob("*") if p.is_file())
        names = [name for name in found if name.partition("/")[0] not in draft.unlisted]
        files = _list(new, names, draft.known)
        write_json(new / MANIFEST, _manifest(kind, draft.content, files, parents, made_by, recipe))
        if recipe is not None:
            keep_manifest(new)
        _share(new, names)
        for name in [*found, MANIFEST]:
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
    made_by: Mapping[str, Any] | None = None,
    files: Sequence[str] = (),
    known: Mapping[str, str] | None = None,
    recipe: Recipe | None = None,
) -> None:
    """Publish an artifact that consists of a manifest, and of files that are written already.

    Other files and folders in `folder` stay.

    Args:
        folder: The artifact's folder.
        kind: Its kind.
        content: The manifest's content.
        made_by: Facts about its maker, no part of its identity.
        files: Names of its files.
        known: sha256 of files that the writer has hashed already: they are not read again.
        recipe: What its stage made it from.
    """
    with replacing(folder / MANIFEST) as new:
        listed = _list(folder, files, known or {})
        write_json(new, _manifest(kind, content, listed, None, made_by, recipe))
    if recipe is not None:
        keep_manifest(folder)
    sync(folder)


def _list(folder: Path, names: Iterable[str], known: Mapping[str, str]) -> dict[str, Any]:
    """Return a manifest's list of files; `known` has the sha256 of some of them."""
    return {
        name: {
            "sha256": known.get(name) or file_sha256(folder / name),
            "bytes": (folder / name).stat().st_size,
        }
        for name in names
    }


def _manifest(
    kind: str,
    content: dict[str, Any],
    files: dict[str, dict[str, Any]],
    parents: Mapping[str, Artifact] | None,
    made_by: Mapping[str, Any] | None,
    recipe: Recipe | None,
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
        **({"recipe": recipe.as_json()} if recipe else {}),
    }


def _share(folder: Path, names: Iterable[str]) -> None:
    """Give files the manifest's mode, the default: libraries make theirs private to the owner.

    Links, including hard links, are unchanged, as they may refer to a user's file.
    """
    mode = stat.S_IMODE((folder / MANIFEST).stat().st_mode)
    for name in names:
        found = (folder / name).lstat()
        alone = stat.S_ISREG(found.st_mode) and found.st_nlink == 1
        if alone and stat.S_IMODE(found.st_mode) != mode:
            (folder / name).chmod(mode)


def _swap_in(new: Path, folder: Path) -> None:
    if exchange(new, folder) == 0:
        sync(folder.parent)
        shutil.rmtree(new, ignore_errors=True)
        return
    old = temporary_path(folder, "old")
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
