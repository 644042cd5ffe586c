"""Files of a published folder that are missing, or that differ from its manifest."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any

from zerotrain.artifact import verdicts
from zerotrain.machine.regular_file import open_to_read

MANIFEST = "manifest.json"
Files = Mapping[str, Mapping[str, Any]]
"""A manifest's list of files: {"a/b": {"sha256": "...", "bytes": 3}}."""


@dataclass(frozen=True)
class Damage:
    """A listed file that is missing, or has other bytes."""

    path: Path
    what: str
    """The fault, in the words that follow the path in messages."""
    differs: bool
    """Whether other bytes are in its place, which the user may want to keep."""
    unread: bool = False
    """Whether the system could not read it, so that its content is unknown."""

    def __str__(self) -> str:
        return f"{self.path}: {self.what}"


def file_sha256(path: Path) -> str:
    """Compute the sha256 of a file's bytes; symbolic links are followed."""
    with open_to_read(path, follow_links=True) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def find_damage(
    folder: Path, files: Files, sha256: Callable[[Path], str] | None = file_sha256
) -> Iterator[Damage]:
    """Yield damaged files; missing files and wrong sizes are found before anything is hashed.

    Args:
        folder: A published folder.
        files: The manifest's list of files.
        sha256: Computes a file's hash; None: compare only presence and sizes.

    Yields:
        Each damaged file.
    """
    sizes = (compare_size(folder / name, files[name])[1] for name in files)
    found = [damage for damage in sizes if damage]
    yield from found
    if found or sha256 is None:
        return
    read = sha256

    def compare(name: str) -> Damage | None:
        return compare_hash(folder / name, files[name], read)

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        yield from filter(None, pool.map(compare, files))


def compare_size(
    path: Path, entry: Mapping[str, Any]
) -> tuple[os.stat_result | None, Damage | None]:
    """Compare a file's presence and size with its entry in the manifest.

    Returns:
        The file's status, if it exists; and the damage, if there is any.
    """
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None, Damage(path, f"listed in {MANIFEST} but missing", differs=False)
    except OSError as error:
        return None, _unread(path, error)
    if not S_ISREG(stat.st_mode):
        return stat, Damage(path, f"listed in {MANIFEST} but no file", differs=True)
    if stat.st_size != entry["bytes"]:
        what = f"{stat.st_size} bytes, {MANIFEST} says {entry['bytes']}"
        return stat, Damage(path, what, differs=True)
    return stat, None


def compare_hash(
    path: Path, entry: Mapping[str, Any], sha256: Callable[[Path], str]
) -> Damage | None:
    """Compare a file's sha256 with its entry in the manifest; store the hash if it differs."""
    try:
        before = path.stat()
        found = sha256(path)
    except OSError as error:
        return _unread(path, error)
    if found == entry["sha256"]:
        return None
    verdicts.remember(path, before, found)
    return Damage(
        path, f"sha256 {found[:12]}, {MANIFEST} says {entry['sha256'][:12]}", differs=True
    )


def _unread(path: Path, error: OSError) -> Damage:
    return Damage(path, f"cannot be read ({error.strerror})", differs=False, unread=True)
