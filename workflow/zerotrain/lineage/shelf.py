"""The published folders of a project: read as they lie, by path or by identity."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from zerotrain.artifact import MANIFEST, Artifact
from zerotrain.artifact.manifest import FORMAT
from zerotrain.artifact.untrusted import PARTS, find_manifest_error

RESULTS = "results"


class Unreadable(Exception):
    """A folder without a manifest that can be read; the text says what was found instead."""

    def __init__(self, path: Path, found: str) -> None:
        super().__init__(found)
        self.path = path
        """The folder if it is not there, else its manifest."""


def load(folder: Path) -> Artifact:
    """Read a manifest, and change nothing: a trace mends no folder, nor stops at the first fault.

    Raises:
        Unreadable: there is none, or it is none of this format.
    """
    path = folder / MANIFEST
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        if folder.is_dir():
            raise Unreadable(path, "nothing") from error
        raise Unreadable(folder, "no such folder") from error
    except OSError as error:
        raise Unreadable(path, f"what cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise Unreadable(path, f"what is not JSON ({error})") from error
    found = found if isinstance(found, dict) else {}
    if found.get("format") != FORMAT:
        said = f"format {found.get('format')!r}, of which this version knows {FORMAT}"
        raise Unreadable(path, said)
    if not isinstance(found.get("kind"), str):
        raise Unreadable(path, "no kind")
    if wrong := find_manifest_error(found):
        raise Unreadable(path, wrong)
    return Artifact(folder, found["kind"], *(found[part] for part in PARTS))


class Shelf:
    """What is published in one project."""

    def __init__(self, root: Path) -> None:
        self.root = root
        """The folder that relative paths of manifests count from."""
        self.unreadable: list[Path] = []
        """Folders under results/ with a manifest that says nothing; known once `published` is."""

    @cached_property
    def published(self) -> list[Artifact]:
        """Every readable folder under results/, sorted by path."""
        found = []
        for folder in _with_manifest(self.root / RESULTS):
            try:
                found.append(load(folder))
            except Unreadable:
                self.unreadable.append(folder)
        return found

    @cached_property
    def _by_identity(self) -> dict[str, list[Artifact]]:
        found: dict[str, list[Artifact]] = {}
        for one in self.published:
            found.setdefault(one.identity, []).append(one)
        return found

    def same_as(self, identity: str) -> list[Artifact]:
        """The folders under results/ that have this identity."""
        return self._by_identity.get(identity, [])

    def place(self, path: str | Path) -> Path:
        """Where a path of a manifest leads."""
        return self.root / path

    def shown(self, path: Path) -> str:
        """A path as manifests write it, relative to the project where it lies in it."""
        try:
            return path.relative_to(self.root).as_posix()
        except ValueError:
            return str(path)


def has_manifest(folder: Path) -> bool:
    """Whether one lies there; not where it is forbidden to look."""
    return os.path.isfile(folder / MANIFEST)


def _with_manifest(top: Path) -> Iterator[Path]:
    """Folders that hold a manifest, through links too: large runs lie on other disks. Hidden ones
    are what a killed writer left."""
    seen = set()
    for folder, below, names in os.walk(top, followlinks=True):
        below[:] = sorted(name for name in below if not name.startswith("."))
        if (real := os.path.realpath(folder)) in seen:
            below.clear()
            continue
        seen.add(real)
        if MANIFEST in names:
            yield Path(folder)


def enclosing(path: Path) -> Path | None:
    """The published folder that a path is, or lies in; None where no manifest is above it."""
    for folder in (path, *path.parents):
        if has_manifest(folder):
            return folder
    return None


def project_of(folder: Path, parents: dict[str, Any]) -> Path:
    """The folder that a published folder's parents are named from.

    A project that holds the folder counts before the working directory: in another project the
    same paths are another run's.
    """
    here = Path.cwd()
    above = [*folder.parents, *folder.resolve().parents]
    for root in [*([here] if here in above else []), *above, here]:
        if any(has_manifest(root / said["path"]) for said in parents.values()):
            return root
    inside = [place.parent for place in above if place.name == RESULTS]
    return inside[0] if inside else here
