"""Comparison of every file of a cache with its manifest; damage is listed by sample."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from zerotrain import artifact
from zerotrain.artifact import file_sha256
from zerotrain.artifact.damage import Damage, compare_hash, compare_size
from zerotrain.artifact.rebuilding import rebuild_hint
from zerotrain.cache.layout import (
    CONDITIONING,
    KIND,
    LATENTS,
    MASKS,
    TEXT,
    read_index,
    shard_number,
)
from zerotrain.cache.orphans import orphan_shards
from zerotrain.cache.token_layout import TOKENS, read_token_index
from zerotrain.machine.disk import size

SHARD = re.compile(r"(?P<series>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")


@dataclass(frozen=True)
class Verdict:
    """Whether a cache is whole."""

    whole: bool
    lines: list[str]


def verify(folder: Path) -> Verdict:
    """Hash every file of a cache that its manifest lists, and every orphan.

    What is damaged is remembered: the next `snakemake` makes it again, and nothing else.

    Raises:
        PipelineError: the cache has no manifest, or a wrong one.
    """
    found = artifact.read_manifest(folder, KIND)
    files = found.files

    def compare(name: str) -> Damage | None:
        path = found.folder / name
        return compare_size(path, files[name])[1] or compare_hash(path, files[name], file_sha256)

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        damage = dict(zip(files, pool.map(compare, files), strict=True))
    damaged = {name: one for name, one in damage.items() if one}
    lines = []
    for name, one in damaged.items():
        lines += [str(one), *(f"  {sample}" for sample in _samples(folder, name))]
    for path in orphan_shards(folder):
        if file_sha256(path) != path.stem:
            lines.append(f"{path}: damaged; nothing is taken from it, and nothing needs it")
    count = sum(entry["bytes"] for entry in files.values())
    if damaged:
        lines.append(f"{folder}: {len(damaged)} of {len(files)} files are damaged or missing; "
                     f"{rebuild_hint(folder, KIND, found.parents)}")  # fmt: skip
    else:
        lines.append(f"{folder}: whole, {len(files)} files, {size(count)}")
    return Verdict(not damaged, lines)


def _samples(folder: Path, name: str) -> Iterator[str]:
    """Yield the samples with tensors in a shard, or say that all or none are concerned."""
    shard = SHARD.fullmatch(name)
    if shard is None:
        yield "no sample's tensors are in this file"
        return
    number, count = int(shard["number"]), int(shard["count"])
    try:
        keys = list(_keys(folder, shard["series"]))
    except (OSError, ValueError):
        yield "the index is damaged too, so it is not known which samples are in it"
        return
    for sample in dict.fromkeys(one for one, key in keys if shard_number(key, count) == number):
        yield f"{sample}: its {shard['series']}"


def _keys(folder: Path, series: str) -> Iterator[tuple[str, str]]:
    """Yield each sample with its keys in a series."""
    if series == TOKENS:
        for position, row in enumerate(read_token_index(folder).rows):
            yield from ((f"row {position}", key) for key in row.keys)
        return
    for entry in read_index(folder).entries:
        keys = {
            LATENTS: (
                (entry.latents, entry.flipped),
                entry.other_latents,
                entry.other_flipped,
            ),
            TEXT: ((entry.text, entry.empty_text), entry.other_texts),
            CONDITIONING: ((entry.conditioning,), entry.other_conditioning),
            MASKS: ((entry.mask,), entry.other_masks),
        }.get(series, ())
        found = chain.from_iterable(variants or () for variants in keys)
        yield from ((entry.file, key) for key in found if key is not None)
