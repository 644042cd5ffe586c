"""Removal of what a cache keeps and no sample needs: orphans, and what a killed encoding left."""

from __future__ import annotations

import contextlib
from pathlib import Path

from zerotrain.artifact.in_use import is_held, without_writers
from zerotrain.cache.orphans import orphan_shards
from zerotrain.cache.record import RECORD
from zerotrain.cache.writer import ORPHANS, PARTIAL
from zerotrain.machine.disk import size


def prune(folder: Path, *, unfinished: bool = False, dry_run: bool = False) -> list[str]:
    """Remove orphans, and what a killed process was writing; return what was done.

    Args:
        folder: A cache folder.
        unfinished: Whether to remove the finished shards of an interrupted encoding, too, from
            which the next one would continue.
        dry_run: Whether to only say what would be removed.
    """
    with without_writers(folder) as alone:
        if not alone:
            return [f"{folder}: a running job writes here or next to it; nothing is removed"]
        if is_held(folder):
            return [f"{folder}: a training reads it; nothing is removed"]
        waiting = sorted(folder.glob(f"{PARTIAL}/*.safetensors"))
        found = {
            "orphan": orphan_shards(folder),
            "torn": [path for path in _files(folder / PARTIAL) if path not in waiting],
            "unfinished": waiting if unfinished else [],
        }
        did = "would remove" if dry_run else "removed"
        lines = [
            f"{folder}: {did} {_counted(paths, name)}" for name, paths in found.items() if paths
        ]
        if waiting and not unfinished:
            kept = _counted(waiting, "unfinished")
            lines.append(f"{folder}: keeps {kept}, from which the next encoding continues")
        if not dry_run:
            for path in (path for paths in found.values() for path in paths):
                path.unlink()
            _remove_emptied(folder)
    return lines or [f"{folder}: nothing to remove"]


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*") if path.name != RECORD)


def _counted(paths: list[Path], name: str) -> str:
    shards = "shard" if len(paths) == 1 else "shards"
    return f"{len(paths)} {name} {shards}, {size(sum(path.stat().st_size for path in paths))}"


def _remove_emptied(folder: Path) -> None:
    """Remove folders that have nothing but a record."""
    for place in (*folder.glob(f"{ORPHANS}/*/"), folder / PARTIAL):
        if place.is_dir() and not _files(place):
            (place / RECORD).unlink(missing_ok=True)
            place.rmdir()
    with contextlib.suppress(OSError):
        (folder / ORPHANS).rmdir()
