"""What a cache keeps of what it has encoded: groups after an upgrade, and orphans.

If the recorded encoding conditions differ from the present ones, or are missing, a few items of
each group are encoded again and compared. A group that differs is forgotten, and thus encoded
again.

Equal bits are equal. A different order of computation causes rounding differences, for which there
is a tolerance: one step of the stored dtype per value, plus a share of the largest value that
depends on the dtype of the computation. Tensor cores that round float32 to TF32 (2^-11 per product)
exceed it, as does another scale, crop, layer or tokenizer.

Orphans are what a cache does not need now, kept until it is pruned: an image that is removed and
added again, or a setting that is switched and switched back, is then not encoded twice. They are
safetensors shards in `orphans/<record>/` of the cache folder, named by their digests, next to the
record of what encoded them: after an upgrade they are compared before they are used, as any stored
tensors. They are no part of the artifact.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from zerotrain.artifact import UnpublishedFolder, digest, link_or_copy
from zerotrain.cache.record import ENCODING, RECORD, Record, read_record, write_record
from zerotrain.cache.writer import (
    ORPHANS,
    PARTIAL,
    PUBLISHED,
    StoredShards,
    Tensors,
    pieces,
    write_shard,
)
from zerotrain.machine.disk import size


@dataclass(frozen=True)
class Group:
    """The keys of a series."""

    what: str
    """Name of its items in messages."""
    keys: Sequence[str]
    """Keys in the order from which the compared ones are chosen."""
    encode: Callable[[Sequence[str]], Iterator[Tensors]]
    computed: str
    """Dtype of the computation."""
    shown: Callable[[str], str]
    """Returns the name of a key's item."""


def keep_equal(stored: StoredShards, folder: Path, groups: Sequence[Group], now: Record) -> None:
    """Forget stored groups whose items are now encoded to other numbers.

    Args:
        stored: The folder's content.
        folder: The cache folder.
        groups: The required series.
        now: The record of this process.
    """
    # A run that was killed while encoding again left both; the waiting shards were encoded last.
    waiting = read_record(folder / PARTIAL / RECORD)
    if (folder / PARTIAL).is_dir():
        wanted = {key for group in groups for key in group.keys}
        if waiting != now:
            stored.forget([key for key in stored.waiting() if key not in wanted])
        for group in groups:
            _compare(stored, group, waiting, now, PARTIAL)
        write_record(folder / PARTIAL / RECORD, now)
    published = read_record(folder / ENCODING)
    for group in groups:
        _compare(stored, group, published, now, PUBLISHED)
    for place in sorted(folder.glob(f"{ORPHANS}/*/")):
        encoded = read_record(place / RECORD)
        for group in groups:
            _compare(stored, group, encoded, now, f"{ORPHANS}/{place.name}")


def _compare(
    stored: StoredShards, group: Group, before: Record | None, now: Record, origin: str
) -> None:
    changes = None if before is None else before.changes(now)
    keys = [key for key in dict.fromkeys(group.keys) if key in stored]
    keys = [key for key in keys if stored.origin(key) == origin]
    if not keys or changes == {}:
        return
    chosen = spread(keys)
    found = first_deviation(
        chosen, map(stored.tensors, chosen), group.encode(chosen), group.computed
    )
    why = _described(changes)
    if found is None:
        print(
            f"{why}: {len(keys)} {group.what} are kept; {len(chosen)} of them, encoded again, are "
            "equal"
        )
        return
    print(
        f"{why}: {len(keys)} {group.what} are encoded again; those of {group.shown(found.key)} "
        f"{found.what}"
    )
    stored.forget(keys)


def _described(changes: dict[str, tuple[str, str]] | None) -> str:
    if changes is None:
        return "software that encoded is not recorded"
    moved = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in changes.items())
    return f"software changed ({moved})"


T = TypeVar("T")

ITEMS = 8
"""Number of items of each series that are compared."""
SHARE = {"fp32": 2.0**-14, "fp16": 2.0**-7, "bf16": 2.0**-4}
"""Share of a tensor's largest value that rounding may change, by the dtype of the computation.
Measured on CPUs with random weights: the encoder of SDXL's autoencoder in float32 changes by 1.7e-6
with other kernels and by 1.0e-3 in TF32; CLIP-L changes by 2.5e-3 in fp16 and 2.0e-2 in bf16 with
another attention implementation."""


class Deviation(NamedTuple):
    """The first item that differs."""

    key: str
    what: str
    """The difference, as the end of a sentence."""


def spread(items: Sequence[T]) -> list[T]:
    """Select at most ITEMS of them at equal distances, including the first and the last."""
    if len(items) <= ITEMS:
        return list(items)
    return [items[round(i * (len(items) - 1) / (ITEMS - 1))] for i in range(ITEMS)]


def first_deviation(
    keys: Sequence[str], stored: Iterator[Tensors], encoded: Iterator[Tensors], computed: str
) -> Deviation | None:
    """Compare stored tensors with the present encoding of their keys; None if all are equal.

    Args:
        keys: The keys.
        stored: The cached tensors of each key.
        encoded: The tensors of each key as computed now.
        computed: Dtype of the computation: fp32, fp16 or bf16.
    """
    for key, before, after in zip(keys, stored, encoded, strict=True):
        if before.keys() != after.keys():
            names = [", ".join(sorted(one)) for one in (before, after)]
            return Deviation(key, f"hold {names[0]} and would hold {names[1]}")
        for name in sorted(before):
            if what := _deviation(before[name], after[name], computed):
                return Deviation(key, f"differ: {name} {what}")
    return None


def _deviation(before: torch.Tensor, after: torch.Tensor, computed: str) -> str:
    """Describe the difference between two tensors; empty if rounding explains it."""
    if before.dtype != after.dtype or before.shape != after.shape:
        shown = [f"{one.dtype} {list(one.shape)}".removeprefix("torch.") for one in (before, after)]
        return f"is {shown[0]}, now {shown[1]}"
    if torch.equal(before, after):
        return ""
    if not before.dtype.is_floating_point:
        return f"has {int((before != after).sum())} other numbers"
    old, new = before.double(), after.double()
    moved, largest = (new - old).abs(), float(old.abs().max())
    step = torch.finfo(before.dtype).eps * old.abs()
    allowed = step + SHARE[computed] * largest
    if bool((moved <= allowed).all()):
        return ""
    return f"moved by up to {float(moved.max()):.2g}, its largest value is {largest:.2g}"


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
