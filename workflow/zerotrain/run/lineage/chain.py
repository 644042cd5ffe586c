"""The published folders of a project, by path or by identity, and chains of them: folders with the
parents that they name, their findings, the check of their files, and facts about each: steps,
presets, learning rate, numbers of samples."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from zerotrain.artifact import MANIFEST, RECORDS, Artifact
from zerotrain.artifact.documents import DocumentError, read_json, read_object, read_yaml
from zerotrain.artifact.layout import RESULTS, SETTINGS
from zerotrain.artifact.manifest import DATASET, FORMAT, PARTS, find_manifest_error
from zerotrain.errors import PipelineError
from zerotrain.machine.regular_file import open_to_read
from zerotrain.state.ran_on import RanOn


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


How = Literal["stated", "moved", "copy", "place"]
Problem = Literal["missing", "different", "unknown"]
SHORT = 12
"""Digits of a digest that are shown."""


@dataclass(frozen=True)
class Finding:
    """Something that breaks a chain."""

    problem: Problem
    """missing; different from its record; or unknown: its origin is not recorded."""
    path: str
    expected: str
    found: str


@dataclass
class Node:
    """A folder of the chain, or the source of a dataset."""

    path: str
    kind: str
    artifact: Artifact | None = None
    links: list[Link] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def identity(self) -> str | None:
        """Return the digest of the folder; None without a manifest."""
        return self.artifact.identity if self.artifact else None

    @property
    def bytes(self) -> int:
        """Return the total size of the files that the manifest lists."""
        return sum(entry["bytes"] for entry in self.artifact.files.values()) if self.artifact else 0

    def parent(self, *names: str) -> Node | None:
        """Return the first parent with one of these names."""
        return next((link.node for link in self.links if link.name in names), None)


@dataclass
class Link:
    """A parent, as its child records it."""

    name: str
    identity: str | None
    """The identity that the child records; None if it records none."""
    node: Node
    how: How = "stated"
    """How it was found: at the recorded path; moved with the child; as a copy; or by its place in
    the run's layout, next to a folder that is missing or names no parents."""


@dataclass
class Walk:
    """A chain, from the requested folder."""

    root: Path
    start: Node
    nodes: list[Node]
    """Each node once, children before parents."""

    @property
    def findings(self) -> list[Finding]:
        """List everything that breaks the chain."""
        return [finding for node in self.nodes for finding in node.findings]

    @property
    def whole(self) -> bool:
        """Return whether nothing breaks the chain."""
        return not self.findings


LAUNCH = ("preset", "learning_rate", "lr_scheduler", "global_batch_size", "start_step",
          "until_step", "epoch_size", "resolution", "seed")  # fmt: skip
POSITION = ("run", "phase", "step", "samples", "optimizer")
CONTENT = {
    "weights": ("family", "step", "dtype", "ema"),
    "exported": ("to", "family", "step", "dtype", "ema"),
    "cache": ("resolution", "max_length", "dtype", "count"),
    "dataset": ("count", "repeats"),
    "base": ("base", "family", "commit", "file_sha256"),
}
"""Keys of the content that are facts, by kind."""
COUNTS = ("step", "samples", "start_step", "until_step", "epoch_size")
"""Facts that must be integers."""
MADE_BY = ("run", "phase", "commit", "version")
SOURCE = f"{RECORDS}made_by.json"
"""Of a checkpoint: commit of the source that published it, and version of the stage."""
ENCODING = f"{RECORDS}encoding.json"
"""Of a cache: the software that encoded it."""


def facts_of(folder: Artifact) -> dict[str, Any]:
    """Return the facts about a folder under stable names; facts from damaged files are omitted."""
    try:
        found = {key: folder.content.get(key) for key in CONTENT.get(folder.kind, ())}
        made_by = source_of(folder)
        found |= {key: made_by.get(key) for key in MADE_BY}
        found["preset"] = _of(folder.made_by.get("engine"), "preset")
        if folder.kind == "launch":
            resolved = read_yaml(folder.folder / "run.yaml", version="1.1")
            found |= {key: _of(_of(resolved, key), "value") for key in LAUNCH}
        if folder.kind in ("checkpoint", "state"):
            position = read_object(folder.folder / f"{folder.kind}.json")
            found |= {key: position.get(key) for key in POSITION}
            found["preset"] = _of(position.get("engine"), "preset")
            groups = position.get("param_groups") or [{}]
            found["learning_rate"] = _of(groups[0], "lr")
            found |= RanOn.of_manifest(position, 0).made_by()
        elif folder.kind == "cache" and ENCODING in folder.files:
            software = read_object(folder.folder / ENCODING).get("software")
            found |= RanOn.of_encoding(software).made_by() if isinstance(software, dict) else {}
        else:
            found |= RanOn.of_manifest(folder.made_by, 0).made_by()
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        pass  # verify compares the files with the manifest, and reports them
    return {
        key: value
        for key, value in found.items()
        if value is not None and (key not in COUNTS or type(value) is int)
    }


def source_of(folder: Artifact) -> dict[str, Any]:
    """Return the made_by of a folder; a checkpoint's commit and version come from its records."""
    if SOURCE not in folder.files:
        return folder.made_by
    try:
        found = read_object(folder.path(SOURCE))
    except (OSError, PipelineError):
        return folder.made_by
    facts = {key: value for key, value in found.items() if isinstance(value, str | int)}
    return {**folder.made_by, **facts}


def _of(found: Any, key: str) -> Any:
    return found.get(key) if isinstance(found, dict) else None


CHUNK = 2**22
"""Bytes per read."""


class Files:
    """The sha256 of files. Hard-linked files, which exports create, are read once."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], str] = {}
        self._stopped = False

    def sha256(self, path: Path) -> str:
        """Return the sha256 of a file's bytes.

        Raises:
            OSError: it cannot be read.
        """
        stat = path.stat()
        key = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
        if key not in self._known:
            self._known[key] = self._read(path)
        return self._known[key]

    def _read(self, path: Path) -> str:
        found = hashlib.sha256()
        with open_to_read(path, follow_links=True) as stream:
            while not self._stopped and (chunk := stream.read(CHUNK)):
                found.update(chunk)
        return found.hexdigest()

    def check(self, folder: Artifact, shown: str) -> list[Finding]:
        """List the files of a manifest that are missing or differ, in its order."""

        def check(item: tuple[str, dict[str, Any]]) -> Finding | None:
            return self._check(folder.folder / item[0], f"{shown}/{item[0]}", item[1])

        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            try:
                return [found for found in pool.map(check, folder.files.items()) if found]
            except BaseException:
                self._stopped = True  # Ctrl-C does not wait until files of many GB are read
                raise

    def _check(self, path: Path, shown: str, recorded: dict[str, Any]) -> Finding | None:
        expected = f"sha256 {str(recorded['sha256'])[:SHORT]}, {recorded['bytes']} bytes"
        try:
            if not path.is_file():
                what = "a link that leads nowhere" if path.is_symlink() else "nothing"
                return Finding("missing", shown, expected, what)
            size = path.stat().st_size
            sha256 = self.sha256(path)
        except OSError as error:
            return Finding("missing", shown, expected, f"what cannot be read: {error.strerror}")
        if (sha256, size) != (recorded["sha256"], recorded["bytes"]):
            return Finding("different", shown, expected, f"sha256 {sha256[:SHORT]}, {size} bytes")
        return None


def unlisted(folder: Artifact) -> list[str]:
    """List files that the folder's manifest does not list, outside nested published folders."""
    inside = [p.parent for p in folder.folder.rglob(MANIFEST) if p.parent != folder.folder]
    inside += [folder.folder / SETTINGS] if folder.kind == DATASET else []
    return sorted(
        name
        for path in folder.folder.rglob("*")
        if os.path.isfile(path)
        and (name := path.relative_to(folder.folder).as_posix()) not in folder.files
        and name != MANIFEST
        and not any(part.startswith(".") for part in Path(name).parts)
        and not any(path.is_relative_to(other) for other in inside)
    )
