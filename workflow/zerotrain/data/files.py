"""The files of a dataset of images, each hashed again only if its size, time or inode moved.

Next to a dataset's manifest is `.files/listing` with size, time, inode and sha256 of each file, as
prepare_dataset read it. The digest of all names and contents is an input of the dataset's recipe.

So planning an unchanged dataset costs a walk through its folders. A file that is new since
prepare_dataset counts as it is, unread; one that moved is hashed. A dataset without a listing,
from another clone, is hashed once.
"""

from __future__ import annotations

import json
import os
import stat as stat_bits
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from zerotrain.artifact import digest, file_sha256, is_published, replacing
from zerotrain.artifact.documents import parse_json, read_bytes
from zerotrain.data.open import source_files, source_roots
from zerotrain.data.source import MOST_IMAGE_BYTES
from zerotrain.machine.ordered_pool import in_order
from zerotrain.machine.regular_file import write_bytes

if TYPE_CHECKING:
    from zerotrain.config.data import DataConfig

FOLDER, LISTING = ".files", "listing"
FORMAT = 1
MOST_LISTING = 2**32
"""Bytes of the listing; each file takes some hundred."""
THREADS = 8
"""Threads that hash files which moved."""
AT_A_TIME = 256
UNREAD = "-"
"""In place of the sha256 of a file that prepare_dataset did not read, or not as it is now."""


@dataclass(frozen=True)
class Changes:
    """The files of a dataset that differ from those of its listing, sorted."""

    changed: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return bool(self.changed or self.new or self.removed)


class DatasetFiles:
    """The present files of a dataset, and its listing of them.

    Args:
        data: The section `data` of the configuration.
        folder: The folder of the dataset's manifest.
        walked: What `walk` finds; default: what it found first in this process, as a plan does.
    """

    def __init__(self, data: DataConfig, folder: Path, walked: bytes | None = None) -> None:
        self._data = data
        self._folder = folder
        self._given = walked

    @property
    def paths(self) -> list[str]:
        """List the files whose content decides the dataset, sorted, as data.open.source_files."""
        return source_files(self._data)

    def are_unchanged(self) -> bool:
        """Return whether neither a file nor the section `data` moved since prepare_dataset."""
        head, stats, _ = self._listing
        return head.get("data") == self._values and stats == self._walked

    def find_changes(self) -> Changes | None:
        """Find the files that differ from the listing; None if there is no listing.

        Raises:
            PipelineError: the folder or the table of captions cannot be used.
        """
        if not self._listed:
            return None
        if self.are_unchanged():
            return Changes()
        before = {path: _token(stat, sha256) for path, (stat, sha256) in self._listed.items()}
        now = self.tokens
        return Changes(
            sorted(path for path in now.keys() & before.keys() if now[path] != before[path]),
            sorted(now.keys() - before.keys()),
            sorted(before.keys() - now.keys()),
        )

    def update(self) -> str:
        """Return the digest of the present files, and remember the hashes of those that moved.

        Raises:
            PipelineError: the folder or the table of captions cannot be used.
            DiskError: the disk is full or read-only, or fails.
        """
        head, _, _ = self._listing
        if self.are_unchanged():
            return head["digest"]
        found = digest(sorted(self.tokens.items()))
        if found == head.get("digest") or (not head and is_published(self._folder)):
            self._write_listing(self.tokens, found)
        return found

    def record(self, known: Mapping[str, str]) -> str:
        """Write the listing of what prepare_dataset read, and return its digest.

        Args:
            known: sha256 of files by path; others are hashed.

        Raises:
            DiskError: the disk is full or read-only, or fails.
        """
        paths = source_files(self._data)

        hashes = {**_hash_all([path for path in paths if path not in known]), **known}
        stats = {path: self._stats.get(path, UNREAD) for path in paths}
        # A file that was edited meanwhile is hashed by the next plan.
        found = {
            path: hashes[path] if stat == _stat(path) and hashes[path] != UNREAD else stat
            for path, stat in stats.items()
        }
        whole = digest(sorted(found.items()))
        self._write_listing(found, whole)
        return whole

    @cached_property
    def tokens(self) -> dict[str, str]:
        """Return what identifies each file: its sha256, or size, time and inode if it is unread."""
        unlisted = not self._listed and is_published(self._folder)
        found, moved = {}, []
        for path in source_files(self._data):
            stat = self._stats.get(path) or _stat(path)
            before, sha256 = self._listed.get(path, ("", UNREAD))
            if stat == before:
                found[path] = _token(stat, sha256)
            elif sha256 != UNREAD or unlisted:
                moved.append(path)
            else:
                found[path] = stat
        for path, sha256 in _hash_all(moved).items():
            found[path] = self._stats.get(path, UNREAD) if sha256 == UNREAD else sha256
        return found

    @cached_property
    def _walked(self) -> bytes:
        if self._given is not None:
            return self._given
        return _walk_once(*_walked_places(self._data))

    @cached_property
    def _stats(self) -> dict[str, str]:
        return _split(self._walked)

    @cached_property
    def _values(self) -> str:
        return digest(self._data.model_dump(mode="json", exclude={"name", "num_workers"}))

    @cached_property
    def _listing(self) -> tuple[dict[str, str], bytes, bytes]:
        """Read the listing: its head, the walk as bytes, and the sha256 of files as bytes."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            path = self._folder / FOLDER / LISTING
            line, _, rest = read_bytes(path, most=MOST_LISTING).partition(b"\n")
            head = parse_json(line, path)
            if head["format"] == FORMAT:
                return head, rest[: head["walked"]], rest[head["walked"] :]
        return {}, b"", b""

    @cached_property
    def _listed(self) -> dict[str, tuple[str, str]]:
        """Return stat and sha256 of each listed file of the dataset."""
        _, walked, hashed = self._listing
        stats, hashes = _split(walked), _split(hashed)
        return {path: (stats.get(path, ""), sha256) for path, sha256 in hashes.items()}

    def _write_listing(self, tokens: Mapping[str, str], whole: str) -> None:
        hashed = "".join(
            f"{path}\0{UNREAD if ' ' in token else token}\0" for path, token in tokens.items()
        )
        size = len(self._walked)
        head = {"format": FORMAT, "walked": size, "digest": whole, "data": self._values}
        with replacing(self._folder / FOLDER / LISTING) as new:
            start = json.dumps(head).encode() + b"\n"
            write_bytes(new, start + self._walked + hashed.encode(errors="surrogateescape"))


def walk(data: DataConfig) -> bytes:
    """Return path, and size, time and inode, of each file below the roots of a dataset of images.

    They are sorted; a zero byte follows each text. Hidden files are left out, as data.listing does.

    Raises:
        PipelineError: a metadata file is missing.
    """
    return _walk(*_walked_places(data))


def _walked_places(data: DataConfig) -> tuple[tuple[str, ...], bool]:
    """Return the roots, and whether links to folders are followed."""
    return tuple(source_roots(data)), any(part.follow_symlinks for part in data.parts)


def _walk(roots: tuple[str, ...], follow_symlinks: bool) -> bytes:
    """Walk through folders, and take roots that are files.

    Args:
        roots: Folders and files; what is missing is left out.
        follow_symlinks: Whether to follow links to folders.
    """
    found: list[str] = []
    waiting, seen = [*roots], {*map(os.path.realpath, roots)}
    while waiting:
        folder = waiting.pop()
        try:
            entries = os.scandir(folder)
        except OSError:
            found.append(f"{folder}\0{_stat(folder)}\0")
            continue
        with entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                elif follow_symlinks and entry.is_symlink() and os.path.isdir(entry.path):
                    if (real := os.path.realpath(entry.path)) not in seen:
                        seen.add(real)
                        waiting.append(entry.path)
                else:
                    try:
                        stat = entry.stat()
                    except OSError:
                        stat = entry.stat(follow_symlinks=False)
                    moved = f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ino}"
                    found.append(f"{entry.path}\0{moved}\0")
    return "".join(sorted(found)).encode(errors="surrogateescape")


_walk_once = cache(_walk)
"""A plan checks a dataset, and then computes its digest: one walk for both."""


def forget_walks() -> None:
    """Walk through folders again that were walked through."""
    _walk_once.cache_clear()


def _token(stat: str, sha256: str) -> str:
    return stat if sha256 == UNREAD else sha256


def _stat(path: str) -> str:
    try:
        stat = os.stat(path)
    except OSError:
        return UNREAD
    return f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ino}"


def _hash_all(paths: Sequence[str]) -> dict[str, str]:
    """Hash files in threads, many small ones at a time."""
    parts = (paths[first : first + AT_A_TIME] for first in range(0, len(paths), AT_A_TIME))
    hashes = in_order(lambda part: [*map(_hash, part)], parts, THREADS)
    return dict(zip(paths, chain.from_iterable(hashes), strict=True))


def _hash(path: str) -> str:
    """Hash a file; UNREAD if it is unreadable, could block as a pipe does, or is no sample by its
    size."""
    try:
        stat = os.stat(path)
        read = stat_bits.S_ISREG(stat.st_mode) and stat.st_size <= MOST_IMAGE_BYTES
        return file_sha256(Path(path)) if read else UNREAD
    except OSError:
        return UNREAD


def _split(joined: bytes) -> dict[str, str]:
    parts = joined.decode(errors="surrogateescape").split("\0")
    return dict(zip(parts[:-1:2], parts[1::2], strict=True))
