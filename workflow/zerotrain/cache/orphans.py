"""Orphans: what a cache has encoded and does not need now, kept until it is pruned.

An image that is removed and added again, or a setting that is switched and switched back, is then
not encoded twice. Orphans are safetensors shards in `orphans/<record>/` of the cache folder, named
by their digests, next to the record of what encoded them: after an upgrade they are compared before
they are used, as any stored tensors. They are no part of the artifact.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path

from zerotrain.artifact import UnpublishedFolder, digest, link_or_copy
from zerotrain.cache.record import ENCODING, RECORD, Record, read_record, write_record
from zerotrain.cache.writer import (
    ORPHANS,
    PARTIAL,
    PUBLISHED,
    StoredShards,
    pieces,
    write_shard,
)
from zerotrain.machine.disk import size


def keep_orphans(
    stored: StoredShards,
    wanted: Collection[str],
    folder: Path,
    draft: UnpublishedFolder,
    *,
    shard_size: int,
) -> None:
    """Put what is stored and not wanted into a draft of the cache folder, outside of its manifest.

    A shard without wanted keys is linked; of another one the rest is written to a new shard. What
    has no readable record of what encoded it is not kept.

    Args:
        stored: The folder's content.
        wanted: The keys of the cache that is published.
        folder: The cache folder.
        draft: The draft that replaces it.
        shard_size: Maximum size of a shard in bytes.
    """
    draft.unlisted = frozenset({ORPHANS})
    records: dict[str, Record | None] = {
        PUBLISHED: read_record(folder / ENCODING),
        PARTIAL: stored.record,
    }
    seen = set(wanted)
    rest: dict[str, list[str]] = {}
    for shard in stored.shards():
        if shard.origin not in records:
            records[shard.origin] = read_record(folder / shard.origin / RECORD)
            if records[shard.origin] is None:
                what = "no record tells what encoded it, so it is not kept"
                print(f"WARNING: {folder / shard.origin}: {what}", file=sys.stderr)
        record = records[shard.origin]
        left = [key for key in shard.names if key not in seen]
        if record is None or not left:
            continue
        seen.update(left)
        if len(left) < len(shard.names):
            rest.setdefault(shard.origin, []).extend(key for key in left if key in stored)
            continue
        target = _place(draft.folder, record)
        link_or_copy(shard.path, target / f"{shard.sha256}.safetensors")
    for origin, keys in rest.items():
        record = records[origin]
        assert record is not None
        held = ((key, stored.tensors(key)) for key in sorted(keys))
        for tensors in pieces(held, shard_size):
            write_shard(tensors, _place(draft.folder, record), record)
    if kept := sum(path.stat().st_size for path in orphan_shards(draft.folder)):
        print(f"orphans: {size(kept)} that no sample needs now; `zerotrain cache prune` removes it")


def orphan_shards(folder: Path) -> list[Path]:
    """List the shards of orphans in a cache folder."""
    return sorted(folder.glob(f"{ORPHANS}/*/*.safetensors"))


def _place(folder: Path, record: Record) -> Path:
    """Return the folder of a record's orphans, with the record in it."""
    place = folder / ORPHANS / digest(asdict(record))[:12]
    if not place.is_dir():
        place.mkdir(parents=True)
        write_record(place / RECORD, record)
    return place
