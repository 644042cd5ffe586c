"""Artifact folders: written beside their place, listed with hashes, published by a rename.

A folder counts as written only when its manifest.json lies in it. Format version 1:

    {"format": 1, "kind": "cache", "content": {...},
     "files": {"a/b": {"sha256": "...", "bytes": 3}},
     "parents": {"dataset": {"path": "...", "identity": "..."}}, "made_by": {...}}

The *identity* of a folder is a digest of its kind, content and files: two folders with one identity
can stand for each other, whoever made them. Files under ``records/`` (logs, timings) are listed and
checked but are no part of the identity.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from zerotrain import __version__
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
            PipelineError: if the manifest does not list it.
        """
        if name not in self.files:
            raise PipelineError(
                f"{self.folder}: {name} is not listed in {MANIFEST}",
                hint="files that the manifest does not list are never read; build the folder again",
            )
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
    except ValueError as error:
        raise PipelineError(f"{path}: not JSON ({error})", hint=f"remove {folder}") from error
    found = found if isinstance(found, dict) else {}
    if found.get("format") != FORMAT or found.get("kind") != kind:
        raise PipelineError(
            f"{path}: kind {found.get('kind')!r}, format {found.get('format')!r}; "
            f"expected kind {kind!r}, format {FORMAT}",
            hint="give the folder of the right stage, or rebuild it with this version",
        )
    artifact = Artifact(
        folder, kind, found["content"], found["files"], found["parents"], found["made_by"]
    )
    if verify:
        artifact.verify()
    return artifact


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
    new = folder.parent / f".{folder.name}.new-{os.getpid()}"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    try:
        draft = Draft(new)
        yield draft
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
    new = folder / f".{MANIFEST}.new-{os.getpid()}"
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
    old = folder.parent / f".{folder.name}.old-{os.getpid()}"
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


def mend(folder: Path) -> None:
    """Clear what a killed writer left beside the folder: the old one comes back, the new goes."""
    if not folder.parent.is_dir():
        return
    name = glob.escape(folder.name)
    for old in folder.parent.glob(f".{name}.old-*"):
        if _writer_lives(old):
            continue
        # Two readers may mend at once, and one that may only read cannot: then it stays.
        with contextlib.suppress(OSError):
            folder.rmdir()  # an empty folder, as Snakemake makes before a job
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                old.rename(folder)
    for new in folder.parent.glob(f".{name}.new-*"):
        if _writer_lives(new):
            continue
        if new.is_dir():
            shutil.rmtree(new, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                new.unlink()


def _writer_lives(leftover: Path) -> bool:
    """Whether the process whose pid ends the name wrote it: a later one of that pid did not."""
    pid = leftover.name.rpartition("-")[2]
    try:
        process = psutil.Process(int(pid))
        ended = process.status() == psutil.STATUS_ZOMBIE
        # Clocks of file servers differ, and boot time is read in whole seconds: 5 are allowed for.
        return not ended and process.create_time() <= leftover.lstat().st_ctime + 5
    except (ValueError, psutil.NoSuchProcess, FileNotFoundError):
        return False


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
