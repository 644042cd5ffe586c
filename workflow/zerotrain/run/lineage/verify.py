"""Verification of files against the manifests that list them."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from zerotrain.artifact import MANIFEST, Artifact
from zerotrain.artifact.layout import SETTINGS
from zerotrain.artifact.manifest import DATASET
from zerotrain.machine.regular_file import open_to_read
from zerotrain.run.lineage.chain import SHORT, Finding

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
