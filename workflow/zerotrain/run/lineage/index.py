"""The published folders of a project, by path or by identity."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from zerotrain.artifact import MANIFEST, Artifact
from zerotrain.artifact.documents import DocumentError, read_json
from zerotrain.artifact.layout import RESULTS
from zerotrain.artifact.manifest import FORMAT, PARTS, find_manifest_error


class UnreadableError(Exception):
    """A folder without a readable manifest; the text names what was found instead."""

    def __init__(self, path: Path, found: str) -> None:
        super().__init__(found)
        self.path = path
        """The folder if it is missing, else its manifest."""


def load(folder: Path) -> Artifact:
    """Read a manifest without side effects: a trace neither recovers a folder nor stops at a fault.

    Raises:
        UnreadableError: there is no manifest, or it has another format.
    """
    path = folder / MANIFEST
    try:
        found = read_json(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        if folder.is_dir():
            raise UnreadableError(path, "nothing") from error
        raise UnreadableError(folder, "no such folder") from error
    except OSError as error:
        raise UnreadableError(path, f"what cannot be read: {error.strerror}") from error
    except DocumentError as error:
        raise UnreadableError(path, f"what cannot be read: {error.why}") from error
    found = found if isinstance(found, dict) else {}
    if found.get("format") != FORMAT:
        problem = f"format {found.get('format')!r}, of which this version knows {FORMAT}"
        raise UnreadableError(path, problem)
    if not isinstance(found.get("kind"), str):
        raise UnreadableError(path, "no kind")
    if wrong := find_manifest_error(found):
        raise UnreadableError(path, wrong)
    return Artifact(folder, found["kind"], *(found[part] for part in PARTS))


class ArtifactIndex:
    """The published folders of one project."""

    def __init__(self, root: Path) -> None:
        self.root = root
        """The folder that manifests' relative paths start from."""
        self.unreadable: list[Path] = []
        """Folders under results/ with an unreadable manifest; filled by `published`."""

    @cached_property
    def published(self) -> list[Artifact]:
        """List all readable folders under results/, sorted by path."""
        found = []
        for folder in _with_manifest(self.root / RESULTS):
            try:
                found.append(load(folder))
            except UnreadableError:
                self.unreadable.append(folder)
        return found

    @cached_property
    def _by_identity(self) -> dict[str, list[Artifact]]:
        found: dict[str, list[Artifact]] = {}
        for one in self.published:
            found.setdefault(one.identity, []).append(one)
        return found

    def find_by_identity(self, identity: str) -> list[Artifact]:
        """Find the folders under results/ that have this identity."""
        return self._by_identity.get(identity, [])

    def resolve(self, path: str | Path) -> Path:
        """Resolve a path from a manifest."""
        return self.root / path

    def display(self, path: Path) -> str:
        """Format a path as manifests do: relative to the project if it is inside it."""
        try:
            return path.relative_to(self.root).as_posix()
        except ValueError:
            return str(path)


def has_manifest(folder: Path) -> bool:
    """Return whether a folder has an accessible manifest."""
    return os.path.isfile(folder / MANIFEST)


def _with_manifest(top: Path) -> Iterator[Path]:
    """Yield folders with a manifest, also through links, as large runs may be on other disks. Skip
    hidden folders, the leftovers of a killed writer."""
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
    """Return the published folder that is or contains a path; None if not found."""
    for folder in (path, *path.parents):
        if has_manifest(folder):
            return folder
    return None


def project_of(folder: Path, parents: dict[str, Any]) -> Path:
    """Return the folder that a published folder's parent paths start from.

    A project that contains the folder takes precedence over the working directory: in another
    project the same paths belong to another run.
    """
    here = Path.cwd()
    above = [*folder.parents, *folder.resolve().parents]
    for root in [*([here] if here in above else []), *above, here]:
        if any(has_manifest(root / parent["path"]) for parent in parents.values()):
            return root
    inside = [place.parent for place in above if place.name == RESULTS.name]
    return inside[0] if inside else here
