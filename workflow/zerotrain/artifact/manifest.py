"""A published folder, read and checked by its manifest."""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerotrain.artifact.leftovers import mend
from zerotrain.artifact.untrusted import check_links, find_manifest_error
from zerotrain.errors import PipelineError

FORMAT = 1
MANIFEST = "manifest.json"
RECORDS = "records/"


def digest(value: Any) -> str:
    """Sha256 of a JSON value in its canonical form (sorted keys, no spaces)."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def file_sha256(path: Path) -> str:
    """Sha256 of a file's bytes; symbolic links are followed."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sizes_digest(place: Path) -> str:
    """The digest by which a folder or a file of elsewhere is remembered: its names and sizes."""
    root = place.parent if place.is_file() else place
    below = [place] if place.is_file() else place.rglob("*")
    files = sorted(path for path in below if path.is_file())
    return digest([[path.relative_to(root).as_posix(), path.stat().st_size] for path in files])


def write_json(path: Path, value: Any) -> None:
    """Write a JSON value so that equal values give equal bytes."""
    path.write_text(json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


@dataclass(frozen=True)
class Artifact:
    """A published folder whose manifest has been read."""

    folder: Path
    kind: str
    content: dict[str, Any]
    files: dict[str, dict[str, Any]]
    parents: dict[str, dict[str, str]]
    made_by: dict[str, Any]

    @property
    def identity(self) -> str:
        """Digest of what the folder holds, without who made it, when, or from which path."""
        files = {n: f["sha256"] for n, f in self.files.items() if not n.startswith(RECORDS)}
        return digest({"kind": self.kind, "content": self.content, "files": files})

    def path(self, name: str) -> Path:
        """The path of a listed file.

        Raises:
            PipelineError: if the manifest does not list it, or it is a link to another place.
        """
        if name not in self.files:
            raise PipelineError(
                f"{self.folder}: {name} is not listed in {MANIFEST}",
                hint="files that the manifest does not list are never read; build the folder again",
            )
        check_links(self.folder, name, self.kind)
        return self.folder / name

    def verify(self) -> None:
        """Check that every listed file exists with its size and sha256.

        Raises:
            PipelineError: naming the first file that is missing or differs.
        """
        hint = f"remove {self.folder} and run snakemake again: it is rebuilt from its inputs"

        def check(item: tuple[str, dict[str, Any]]) -> str | None:
            name, expected = item
            path = self.folder / name
            check_links(self.folder, name, self.kind)
            if not path.is_file():
                return f"{path}: listed in {MANIFEST} but missing"
            size = path.stat().st_size
            if size != expected["bytes"]:
                return f"{path}: {size} bytes, {MANIFEST} says {expected['bytes']}"
            if (found := file_sha256(path)) != expected["sha256"]:
                return f"{path}: sha256 {found[:12]}, {MANIFEST} says {expected['sha256'][:12]}"
            return None

        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            for complaint in pool.map(check, self.files.items()):
                if complaint:
                    raise PipelineError(complaint, hint=hint)


def is_published(folder: Path) -> bool:
    """Whether the folder holds a manifest, the mark of a complete artifact."""
    return (folder / MANIFEST).is_file()


def read(folder: Path, kind: str, *, verify: bool = True) -> Artifact:
    """Read a published folder and check that it is whole.

    Raises:
        PipelineError: no manifest, another kind or format, or (with verify) a file that differs.
    """
    mend(folder)
    path = folder / MANIFEST
    if not path.is_file():
        raise PipelineError(
            f"{folder}: no {MANIFEST}, so this {kind} folder is missing or unfinished",
            hint="run `snakemake --cores all train`, which builds what is missing",
        )
    try:
        found = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise PipelineError(f"{path}: not JSON ({error})", hint=f"remove {folder}") from error
    found = found if isinstance(found, dict) else {}
    if found.get("format") != FORMAT or found.get("kind") != kind:
        raise PipelineError(
            f"{path}: kind {found.get('kind')!r}, format {found.get('format')!r}; "
            f"expected kind {kind!r}, format {FORMAT}",
            hint="give the folder of the right stage, or rebuild it with this version",
        )
    if wrong := find_manifest_error(found):
        raise PipelineError(
            f"{path}: {wrong}",
            hint=f"no version of this program writes that: remove {folder} if you do not know who "
            "made it",
        )
    artifact = Artifact(
        folder, kind, found["content"], found["files"], found["parents"], found["made_by"]
    )
    if verify:
        artifact.verify()
    return artifact
