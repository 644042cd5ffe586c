"""Publishing a folder: written beside its place, hashed, and renamed when it is whole."""

from __future__ import annotations

import contextlib
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
    """
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
            _fsync(new / name)
        for directory in [p for p in new.rglob("*") if p.is_dir()]:
            _fsync(directory)
        _fsync(new)
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
    folder.mkdir(parents=True, exist_ok=True)
    mend(folder / MANIFEST)
    new = beside(folder / MANIFEST, "new")
    write_json(new, _manifest(kind, content, {}, parents, made_by))
    _fsync(new)
    new.replace(folder / MANIFEST)
    _fsync(folder)


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
    """Give a file a second name without a second copy where the file system can, else copy it."""
    source = source.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


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
    _fsync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
