"""The groups that a cache keeps after an upgrade, as their numbers have not changed.

If the recorded encoding conditions differ from the present ones, or are missing, a few items of
each group are encoded again and compared. A group that differs is forgotten, and thus encoded
again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from zerotrain.cache.comparison import first_deviation, spread
from zerotrain.cache.record import ENCODING, RECORD, Record, read_record, write_record
from zerotrain.cache.writer import ORPHANS, PARTIAL, PUBLISHED, StoredShards, Tensors


@dataclass(frozen=True)
class Group:
    """The keys of a series whose tensors depend on the same code."""

    code: str
    """Name of the code's digest in the record."""
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
    changes = None if before is None else before.changes(now, group.code)
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
