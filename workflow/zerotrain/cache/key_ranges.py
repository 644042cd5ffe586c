"""Caches that several jobs encode: one range of the keys each, in a folder of its own.

Such a folder has the shards of its range under their digests, and the record of what encoded them.
cache_latents links them, so that it finds everything encoded. A job links what the cache has of its
range, so that it encodes only what is new.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from zerotrain import artifact
from zerotrain.artifact import RECORDS, Artifact, link_or_copy
from zerotrain.artifact.recipe import Recipe
from zerotrain.cache.layout import INDEX, KeyRange, listed_shards
from zerotrain.cache.record import ENCODING, RECORD, Record, read_record, write_record
from zerotrain.cache.writer import PARTIAL, StoredShards, Written
from zerotrain.errors import PipelineError
from zerotrain.machine.disk_errors import writing

KIND = "cache_shard"
NAME = re.compile(r"(\d+)-of-(\d+)")


def parse_range(name: str) -> KeyRange:
    """Parse the name of a range, as `0-of-4`.

    Raises:
        PipelineError: it is not the name of a range.
    """
    found = NAME.fullmatch(name)
    number, count = (int(one) for one in found.groups()) if found else (0, 0)
    if number >= count or count & (count - 1):
        raise PipelineError(
            f"--shard: {name} is not a range of keys",
            hint="write NUMBER-of-COUNT: the first of four is 0-of-4; COUNT is a power of two",
        )
    return KeyRange(number, count)


def link_published(cache: Path, keys: KeyRange, output: Path) -> None:
    """Let the shards of a cache wait in a range's folder, with those of its own earlier content.

    Args:
        cache: The cache folder; it may be missing.
        keys: The range.
        output: The folder of the range.
    """
    record = read_record(cache / ENCODING) or read_record(output / ENCODING)
    waiting = read_record(output / PARTIAL / RECORD)
    if waiting is not None and waiting != record:
        return  # An interrupted job has compared these already.
    found = [(path, path.stem) for path in sorted(output.glob("*.safetensors"))]
    if read_record(output / ENCODING) != record:
        found = []
    with suppress(OSError, ValueError):
        shards = listed_shards(cache, INDEX)
        found += [(cache / one.file, one.sha256) for one in shards if keys.meets(one.file)]
    if found:
        with writing(output):
            (output / PARTIAL).mkdir(parents=True, exist_ok=True)
            if record is not None:
                write_record(output / PARTIAL / RECORD, record)
            for path, sha256 in found:
                _link(path, output, sha256)


def publish_range(
    output: Path,
    series: Iterable[Written],
    now: Record,
    parents: Mapping[str, Artifact],
    recipe: Recipe | None,
) -> None:
    """Publish the folder of a range.

    Args:
        output: The folder.
        series: What was written.
        now: The record of this process.
        parents: Dataset and base.
        recipe: What the folder records of what it is made from.
    """
    with artifact.publish(
        output, KIND, parents=parents, made_by={"stage": "cache_latents"}, recipe=recipe
    ) as draft:
        for written in series:
            for shard in written.series.shards:
                name = f"{shard.sha256}.safetensors"
                link_or_copy(written.paths[shard.file], draft.folder / name)
                draft.known[name] = shard.sha256
        (draft.folder / RECORDS).mkdir()
        write_record(draft.folder / ENCODING, now)


def take_ranges(
    stored: StoredShards,
    output: Path,
    folders: Iterable[Path],
    now: Record,
) -> None:
    """Make the content of ranges available to the cache, unless other software encoded it.

    Args:
        stored: The cache's content.
        output: The folder of the cache.
        folders: The folders of the ranges.
        now: The record of this process.

    Raises:
        PipelineError: a folder is not published, or a file differs from its manifest.
    """
    for folder in folders:
        files = artifact.read(folder, KIND).files
        record = read_record(folder / ENCODING)
        if record is None or record.changes(now):
            print(f"{folder}: encoded by other software; what the cache lacks is encoded again")
            continue
        with writing(output):
            (output / PARTIAL).mkdir(parents=True, exist_ok=True)
            if not (output / PARTIAL / RECORD).exists():
                write_record(output / PARTIAL / RECORD, now)
            for name in files:
                if name.endswith(".safetensors"):
                    sha256 = Path(name).stem
                    stored.add(_link(folder / name, output, sha256), sha256)


def _link(path: Path, output: Path, sha256: str) -> Path:
    target = output / PARTIAL / f"{sha256}.safetensors"
    if path.is_file() and not target.exists():
        link_or_copy(path, target)
    return target
