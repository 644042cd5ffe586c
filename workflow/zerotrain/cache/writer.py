"""Writing a cache shard by shard, taking what an earlier cache in the same folder holds already.

A finished shard waits in `partial/` inside the folder, under the name of its own digest, until the
cache is published and replaces the folder: a killed run loses the shard it was filling, no more.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from zerotrain.artifact import file_sha256, link_or_copy
from zerotrain.cache.layout import (
    INDEX,
    Series,
    Shard,
    key_of,
    listed_shards,
    shard_file,
    shard_number,
    tensor_name,
)
from zerotrain.cache.prompts import PROMPTS_INDEX
from zerotrain.disk_errors import writing
from zerotrain.errors import PipelineError

Tensors = dict[str, torch.Tensor]
"""What is stored for one key, by name."""

PARTIAL = "partial"
BYTES = {"F32": 4, "BF16": 2, "F16": 2, "I32": 4}
"""Of the types that safetensors has, those stored here."""
HEADER_BYTES = 256
"""More than a tensor takes in a shard's header."""


class Stored:
    """What the intact shards of a folder hold, left by a finished or an interrupted run."""

    def __init__(self, folder: Path) -> None:
        self.damaged: list[Path] = []
        """Shards that are not what their digest says; nothing is taken from them."""
        self._names: dict[str, tuple[Path, list[str]]] = {}
        self._shards: dict[tuple[str, ...], tuple[Path, str]] = {}
        self._open: dict[Path, Any] = {}
        for path, sha256 in _listed(folder):
            if path.is_file() and file_sha256(path) == sha256:
                self.add(path, sha256)
            else:
                self.damaged.append(path)

    def __contains__(self, key: str) -> bool:
        return key in self._names

    def tensors(self, key: str) -> Tensors:
        """The tensors of a key that is stored."""
        path, names = self._names[key]
        return {name.partition(".")[2]: self._open[path].get_tensor(name) for name in names}

    def shard(self, keys: Sequence[str]) -> tuple[Path, str] | None:
        """The shard that holds these sorted keys and no others, with its sha256."""
        return self._shards.get(tuple(keys))

    def size(self, key: str) -> int:
        """Bytes that a key takes in a shard; only the shard's header is read."""
        path, names = self._names[key]
        held = [self._open[path].get_slice(name) for name in names]
        return sum(
            math.prod(one.get_shape()) * BYTES[one.get_dtype()] + HEADER_BYTES for one in held
        )

    def add(self, path: Path, sha256: str) -> None:
        """Take an intact shard in."""
        self._open[path] = safe_open(path, framework="pt")
        names = self._open[path].keys()
        by_key: dict[str, list[str]] = {}
        for name in names:
            by_key.setdefault(key_of(name), []).append(name)
        self._names.update({key: (path, names) for key, names in by_key.items()})
        self._shards[tuple(sorted(by_key))] = (path, sha256)


def _listed(folder: Path) -> list[tuple[Path, str]]:
    """Shards in a folder with the digests they should have."""
    partial = [(path, path.stem) for path in sorted(folder.glob(f"{PARTIAL}/*.safetensors"))]
    found = []
    for index in (INDEX, PROMPTS_INDEX):
        with suppress(OSError, ValueError):
            found += listed_shards(folder, index)
    return [*partial, *((folder / shard.file, shard.sha256) for shard in found)]


@dataclass(frozen=True)
class Written:
    """A series that is complete, its shards still under their first names."""

    series: Series
    paths: dict[str, Path]
    """Where each shard lies now, by the name it will have."""
    total: int
    """Keys in it."""
    encoded: int
    """Those of them that were not stored before."""


def write_series(
    name: str,
    keys: Iterable[str],
    encode: Callable[[Sequence[str]], Iterator[Tensors]],
    stored: Stored,
    *,
    folder: Path,
    shard_size: int,
) -> Written:
    """Write the shards of one series; what is stored is copied, the rest encoded.

    The bytes depend on keys, tensors and shard_size alone. At most a shard is held in memory.

    Args:
        name: LATENTS or TEXT.
        keys: What the series shall hold; every key has tensors of the same names.
        encode: Gives the tensors of the keys it is handed, one by one, in their order.
        stored: What need not be encoded; it takes in what is written.
        folder: The cache folder, in whose `partial/` finished shards wait.
        shard_size: Largest size of a shard in bytes.

    Raises:
        PipelineError: a shard cannot hold a single key.
    """
    wanted = sorted(set(keys))
    missing = [key for key in wanted if key not in stored]
    encoded = encode(missing)
    if missing:
        # As if all were as large as the first: where that is so, these shards are the last ones.
        first = next(encoded)
        encoded = chain([first], encoded)
        for held in _ranges(wanted, dict.fromkeys(wanted, _size(first)), shard_size, name):
            if stored.shard(held) is None:
                found = ((k, stored.tensors(k) if k in stored else next(encoded)) for k in held)
                for tensors in _pieces(found, shard_size):
                    stored.add(*_write_shard(tensors, folder / PARTIAL))
    if missing and next(encoded, None) is not None:
        raise AssertionError("more was encoded than asked for")
    ranges = _ranges(wanted, {key: stored.size(key) for key in wanted}, shard_size, name)
    shards, paths = [], {}
    for number, held in enumerate(ranges):
        if not held:
            continue
        path, sha256 = stored.shard(held) or _write_shard(
            _named((key, stored.tensors(key)) for key in held), folder / PARTIAL
        )
        file = shard_file(name, number, len(ranges))
        shards.append(Shard(file, sha256))
        paths[file] = path
    series = Series(len(ranges), tuple(sorted(stored.tensors(wanted[0]))), tuple(shards))
    return Written(series, paths, len(wanted), len(missing))


def _ranges(
    keys: Sequence[str], sizes: Mapping[str, int], limit: int, name: str
) -> list[list[str]]:
    """Sorted keys in the fewest equal ranges, a power of two, that all stay below the limit."""
    if (largest := max(sizes.values())) > limit:
        raise PipelineError(
            f"cache.shard_size: {limit} bytes cannot hold one sample's {name}, {largest} bytes",
            hint="raise cache.shard_size; 268435456 (256 MB) is the default",
        )
    count = 1
    while True:
        ranges: list[list[str]] = [[] for _ in range(count)]
        for key in keys:
            ranges[shard_number(key, count)].append(key)
        if max(sum(sizes[key] for key in held) for held in ranges) <= limit:
            return ranges
        count *= 2


def _pieces(found: Iterable[tuple[str, Tensors]], limit: int) -> Iterator[Tensors]:
    """The tensors of keys in shards below the limit: one, unless some are larger than expected."""
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
    """The tensors of keys under their names in a shard."""
    return {tensor_name(key, name): t for key, tensors in found for name, t in tensors.items()}


def _size(tensors: Tensors) -> int:
    """Bytes that a key takes in a shard, its share of the header included."""
    return sum(tensor.nbytes + HEADER_BYTES for tensor in tensors.values())


def _write_shard(tensors: Tensors, partial: Path) -> tuple[Path, str]:
    unfinished = partial / f"unfinished-{os.getpid()}"
    with writing(partial.parent):
        partial.mkdir(parents=True, exist_ok=True)
        try:
            save_file(tensors, unfinished)
            unfinished.chmod(0o644)  # safetensors leaves it to its owner alone
            sha256 = file_sha256(unfinished)
            path = partial / f"{sha256}.safetensors"
            unfinished.replace(path)
        except BaseException:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)
                partial.rmdir()  # only if nothing finished waits in it
            raise
    return path, sha256


def place(written: Written, folder: Path) -> dict[str, str]:
    """Give the shards their names in a folder; returns their sha256 by name."""
    for file, path in written.paths.items():
        link_or_copy(path, folder / file)
    return {shard.file: shard.sha256 for shard in written.series.shards}
