"""The groups that a cache keeps after an upgrade, as their numbers have not changed.

If the recorded encoding conditions differ from the present ones, or are missing, a few items of
each group are encoded again and compared. A group that differs is forgotten, and thus encoded
again.

Equal bits are equal. A different order of computation causes rounding differences, for which there
is a tolerance: one step of the stored dtype per value, plus a share of the largest value that
depends on the dtype of the computation. Tensor cores that round float32 to TF32 (2^-11 per product)
exceed it, as does another scale, crop, layer or tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from zerotrain.cache.record import ENCODING, RECORD, Record, read_record, write_record
from zerotrain.cache.writer import ORPHANS, PARTIAL, PUBLISHED, StoredShards, Tensors


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
