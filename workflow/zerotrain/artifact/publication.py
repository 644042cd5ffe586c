"""Publication of a folder: written next to its place, hashed, and renamed when it is complete."""

from __future__ import annotations

import contextlib
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerotrain import __version__
from zerotrain.artifact.damage import MANIFEST, file_sha256
from zerotrain.artifact.leftovers import (
    KEPT_MANIFEST,
    keep_manifest,
    recover_interrupted_publish,
    temporary_path,
)
from zerotrain.artifact.links import check_no_link_above
from zerotrain.artifact.manifest import FORMAT, Artifact, write_json
from zerotrain.artifact.recipe import Recipe
from zerotrain.artifact.whole_file import exchange, replacing, sync
from zerotrain.machine.disk_errors import check_no_file, writing


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
    parents: Mapping[str, Artifact] | None = None,
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
        parents: The artifacts that it is made from, by name.
        made_by: Facts about its maker, no part of its identity.
        files: Names of its files.
        known: sha256 of files that the writer has hashed already: they are not read again.
        recipe: What its stage made it from.
    """
    with replacing(folder / MANIFEST) as new:
        listed = _list(folder, files, known or {})
        write_json(new, _manifest(kind, content, listed, parents, made_by, recipe))
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
