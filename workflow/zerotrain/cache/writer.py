"""Writing of a cache shard by shard, reusing the content of an earlier cache in the same folder.

A finished shard waits in `partial/` inside the folder, named by its digest, until the cache is
published and replaces the folder: a killed run loses only the shard that it was filling. What a
published cache no longer has is in `orphans/` (zerotrain.cache.reuse).
"""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from zerotrain.artifact import file_sha256, link_or_copy
from zerotrain.artifact.documents import DocumentError
from zerotrain.artifact.leftovers import WriterLock
from zerotrain.artifact.tensor_file import open_file
from zerotrain.cache.layout import (
    INDEX,
    WHOLE,
    KeyRange,
    Series,
    Shard,
    key_of,
    listed_shards,
    shard_file,
    shard_number,
    tensor_name,
)
from zerotrain.cache.record import PROMPTS_INDEX, RECORD, Record, read_record, write_record
from zerotrain.errors import PipelineError
from zerotrain.machine.disk_errors import writing

Tensors = dict[str, torch.Tensor]
"""The tensors of one key, by name."""

PARTIAL = "partial"
ORPHANS = "orphans"
"""Folder of what no published cache has any more: a folder for each record of what encoded it."""
BYTES = {"F32": 4, "BF16": 2, "F16": 2, "I32": 4}
"""Bytes per element of the stored dtypes, by safetensors' names."""
HEADER_BYTES = 256
"""Upper bound of a tensor's bytes in a shard's header."""


class StoredShard(NamedTuple):
    """A shard of a folder."""

    path: Path
    sha256: str
    names: dict[str, list[str]]
    """Names of its tensors by key."""
    origin: str
    """PARTIAL, a folder of ORPHANS, or PUBLISHED."""


PUBLISHED = ""


class StoredShards:
    """The content of a folder's intact shards, left by a finished or an interrupted run.

    Args:
        folder: The cache folder.
        record: The record of this process; it is written next to the waiting shards in `partial/`.
    """

    def __init__(self, folder: Path, record: Record | None = None) -> None:
        self.damaged: list[Path] = []
        """Shards that do not match their digest; nothing is read from them."""
        self.record = record
        self._lock = WriterLock(folder)
        self._folder = folder
        self._shards: list[StoredShard] = []
        self._orphans: dict[str, StoredShard] = {}
        self._open: dict[Path, Any] = {}
        self._names: dict[str, tuple[Path, list[str]]] = {}
        self._whole: dict[tuple[str, ...], tuple[Path, str]] = {}
        for path, sha256 in _listed(folder):
            if path.is_file() and file_sha256(path) == sha256:
                self.add(path, sha256)
            else:
                self.damaged.append(path)
        for path in sorted(folder.glob(f"{ORPHANS}/*/*.safetensors")):
            try:
                shard = self._opened(path, path.stem)
            except (OSError, DocumentError):
                _report_damaged_orphan(path)
                continue
            self._orphans |= dict.fromkeys(shard.names, shard)

    def __contains__(self, key: str) -> bool:
        if key not in self._names and key in self._orphans:
            self._take_in(self._orphans[key])
        return key in self._names

    def tensors(self, key: str) -> Tensors:
        """Read the tensors of a stored key."""
        path, names = self._names[key]
        return {name.partition(".")[2]: self._open[path].get_tensor(name) for name in names}

    def shard(self, keys: Sequence[str]) -> tuple[Path, str] | None:
        """Return the shard with exactly these sorted keys, with its sha256."""
        return self._whole.get(tuple(keys))

    def size(self, key: str) -> int:
        """Return the bytes of a key in a shard, reading only the shard's header."""
        path, names = self._names[key]
        held = [self._open[path].get_slice(name) for name in names]
        return sum(
            math.prod(one.get_shape()) * BYTES[one.get_dtype()] + HEADER_BYTES for one in held
        )

    def add(self, path: Path, sha256: str) -> None:
        """Add an intact shard."""
        self._shards.append(self._opened(path, sha256))
        self._index(self._shards[-1])

    def _opened(self, path: Path, sha256: str) -> StoredShard:
        self._open[path] = open_file(path)
        by_key: dict[str, list[str]] = {}
        for name in self._open[path].keys():  # noqa: SIM118
            by_key.setdefault(key_of(name), []).append(name)
        return StoredShard(path, sha256, by_key, self._origin(path))

    def _origin(self, path: Path) -> str:
        first, *rest = path.relative_to(self._folder).parts
        if first == ORPHANS:
            return f"{ORPHANS}/{rest[0]}"
        return PARTIAL if first == PARTIAL else PUBLISHED

    def _take_in(self, orphan: StoredShard) -> None:
        """Make an orphan's content available if it is intact: only such are hashed."""
        for key in orphan.names:
            del self._orphans[key]
        if file_sha256(orphan.path) == orphan.sha256:
            self._shards.append(orphan)
            self._index(orphan)
        else:
            _report_damaged_orphan(orphan.path)

    def origin(self, key: str) -> str:
        """Return where a key's tensors are: PARTIAL, a folder of ORPHANS, or PUBLISHED."""
        return self._origin(self._names[key][0])

    def shards(self) -> list[StoredShard]:
        """List the shards, with those first whose tensors are read; then orphans that were not
        looked into."""
        unread = {shard.path: shard for shard in self._orphans.values()}
        known = sorted(self._shards, key=lambda shard: shard.origin.startswith(ORPHANS))
        return [*known, *unread.values()]

    def forget(self, keys: Collection[str]) -> None:
        """Forget the shards that contain these keys; remove waiting ones."""
        paths = {self._names[key][0] for key in keys}
        for path in paths:
            if path.parent.name == PARTIAL:
                path.unlink()
        self._shards = [shard for shard in self._shards if shard.path not in paths]
        self._names, self._whole = {}, {}
        for shard in self._shards:
            self._index(shard)

    def waiting(self) -> list[str]:
        """List the keys whose tensors wait in `partial/`."""
        return [key for key in self._names if self.origin(key) == PARTIAL]

    def _index(self, shard: StoredShard) -> None:
        found = {key: (shard.path, names) for key, names in shard.names.items()}
        if shard.origin.startswith(ORPHANS):
            found = {key: place for key, place in found.items() if key not in self._names}
        self._names.update(found)
        self._whole[tuple(sorted(shard.names))] = (shard.path, shard.sha256)


def _report_damaged_orphan(path: Path) -> None:
    print(f"WARNING: {path} is damaged; nothing is taken from it", file=sys.stderr)


def _listed(folder: Path) -> list[tuple[Path, str]]:
    """List a folder's shards with their expected digests; waiting ones come last."""
    found = []
    for index in (INDEX, PROMPTS_INDEX):
        with suppress(OSError, ValueError):
            found += listed_shards(folder, index)
    partial = [(path, path.stem) for path in sorted(folder.glob(f"{PARTIAL}/*.safetensors"))]
    return [*((folder / shard.file, shard.sha256) for shard in found), *partial]


@dataclass(frozen=True)
class Written:
    """A complete series whose shards still have their first names."""

    series: Series
    paths: dict[str, Path]
    """The present path of each shard, by its final name."""
    total: int
    """Number of keys."""
    encoded: int
    """Number of keys that were not stored before."""


def write_series(
    name: str,
    keys: Iterable[str],
    encode: Callable[[Sequence[str]], Iterator[Tensors]],
    stored: StoredShards,
    *,
    folder: Path,
    shard_size: int,
    only: KeyRange = WHOLE,
) -> Written:
    """Write the shards of one series; reuse stored tensors, and encode the rest.

    The bytes depend only on keys, tensors and shard_size. At most two shards are in memory:
    one is written while the next is encoded.

    Args:
        name: LATENTS or TEXT.
        keys: The keys of the series; every key has tensors of the same names.
        encode: Yields the tensors of the given keys, one by one, in order.
        stored: The content that need not be encoded; written shards are added to it.
        folder: The cache folder; finished shards wait in its `partial/`.
        shard_size: Maximum size of a shard in bytes.
        only: The range whose keys are encoded and written, into the same shards as without it.

    Raises:
        PipelineError: a shard cannot hold a single key.
    """
    wanted = sorted(set(keys))
    own = [key for key in wanted if only.holds(key)]
    if not own:
        return Written(Series(only.count, (), ()), {}, 0, 0)
    missing = [key for key in own if key not in stored]
    encoded = encode(missing)
    if missing:
        # Assume that all keys are as large as the first: if so, these shards are final.
        first = next(encoded)
        encoded = chain([first], encoded)
        sizes = dict.fromkeys(wanted, _size(first))
        final = _ranges(wanted, sizes, shard_size, name, only)
        full = (
            tensors
            for held in final
            if stored.shard(held) is None
            for tensors in pieces(
                ((k, stored.tensors(k) if k in stored else next(encoded)) for k in held), shard_size
            )
        )
        for path, sha256 in _write_in_background(full, folder / PARTIAL, stored.record):
            stored.add(path, sha256)
    if missing and next(encoded, None) is not None:
        raise AssertionError("more was encoded than asked for")
    sizes = dict.fromkeys(wanted, stored.size(own[0])) | {key: stored.size(key) for key in own}
    ranges = _ranges(wanted, sizes, shard_size, name, only)
    shards, paths = [], {}
    for number, held in enumerate(ranges):
        if not held:
            continue
        path, sha256 = stored.shard(held) or write_shard(
            _named((key, stored.tensors(key)) for key in held), folder / PARTIAL, stored.record
        )
        file = shard_file(name, number, len(ranges))
        shards.append(Shard(file, sha256))
        paths[file] = path
    series = Series(len(ranges), tuple(sorted(stored.tensors(own[0]))), tuple(shards))
    return Written(series, paths, len(own), len(missing))


def _ranges(
    keys: Sequence[str], sizes: Mapping[str, int], limit: int, name: str, only: KeyRange
) -> list[list[str]]:
    """Split sorted keys into the fewest equal ranges, a power of two, none above the limit; of
    these only those inside `only` keep their keys."""
    if (largest := max(sizes.values())) > limit:
        raise PipelineError(
            f"cache.shard_size: {limit} bytes cannot hold one sample's {name}, {largest} bytes",
            hint="raise cache.shard_size; 268435456 (256 MB) is the default",
        )
    count = only.count
    while True:
        ranges: list[list[str]] = [[] for _ in range(count)]
        for key in keys:
            ranges[shard_number(key, count)].append(key)
        if max(sum(sizes[key] for key in held) for held in ranges) <= limit:
            return [[key for key in held if only.holds(key)] for held in ranges]
        count *= 2


def pieces(found: Iterable[tuple[str, Tensors]], limit: int) -> Iterator[Tensors]:
    """Group tensors into shards below the limit: one, unless some are larger than expected."""
    piece: list[tuple[str, Tensors]] = []
    total = 0
    for key, tensors in found:
        total += _size(tensors)
        if piece and total > limit:
            yield _named(piece)
            piece, total = [], _size(tensors)
        piece.append((key, tensors))
    if piece:
        yield _named(piece)


def _named(found: Iterable[tuple[str, Tensors]]) -> Tensors:
    """Name the tensors of keys as in a shard."""
    return {tensor_name(key, name): t for key, tensors in found for name, t in tensors.items()}


def _size(tensors: Tensors) -> int:
    """Return the bytes of a key in a shard, including its share of the header."""
    return sum(tensor.nbytes + HEADER_BYTES for tensor in tensors.values())


def _write_in_background(
    shards: Iterable[Tensors], partial: Path, record: Record | None
) -> Iterator[tuple[Path, str]]:
    """Write each shard while the next one is encoded; an error of `shards` loses no full one."""
    with ThreadPoolExecutor(1) as pool:
        before: Future[tuple[Path, str]] | None = None
        for tensors in shards:
            now = pool.submit(write_shard, tensors, partial, record)
            if before is not None:
                yield before.result()
            before = now
        if before is not None:
            yield before.result()


def write_shard(tensors: Tensors, partial: Path, record: Record | None) -> tuple[Path, str]:
    """Write a shard under its digest into a folder, next to the record of what encoded it."""
    unfinished = partial / f"unfinished-{os.getpid()}"
    with writing(partial.parent):
        partial.mkdir(parents=True, exist_ok=True)
        try:
            save_file(tensors, unfinished)
            # safetensors makes it readable only to the owner; the folder follows the umask.
            unfinished.chmod(partial.stat().st_mode & 0o666)
            sha256 = file_sha256(unfinished)
            if record is not None and read_record(partial / RECORD) != record:
                write_record(partial / RECORD, record)
            path = partial / f"{sha256}.safetensors"
            unfinished.replace(path)
        except BaseException:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)
                if not any(partial.glob("*.safetensors")):
                    shutil.rmtree(partial)
            raise
    return path, sha256


def place(written: Written, folder: Path) -> dict[str, str]:
    """Give the shards their names in a folder; return their sha256 by name."""
    for file, path in written.paths.items():
        link_or_copy(path, folder / file)
    return {shard.file: shard.sha256 for shard in written.series.shards}
