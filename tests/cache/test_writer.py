"""Shards: deterministic, bounded, reused where intact."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from zerotrain.cache.layout import (
    LATENTS,
    TEXT,
    Index,
    key_of,
    shard_number,
    write_index,
)
from zerotrain.cache.writer import StoredShards, Tensors, Written, place, write_series
from zerotrain.errors import PipelineError

KEYS = [hashlib.sha256(bytes([n])).hexdigest() for n in range(60)]


def make(keys: Sequence[str]) -> Iterator[Tensors]:
    """Tensors that follow from the key."""
    for key in keys:
        value = torch.full((4, 3, 2), float(int(key[:4], 16)))
        yield {"embeds": value, "pooled": value[0, 0].clone()}


def refuse(keys: Sequence[str]) -> Iterator[Tensors]:
    """Encodes nothing."""
    yield from make(keys[:0])


def write(
    folder: Path, keys: Sequence[str] = KEYS, *, encode=make, stored=None, shard_size=4096
) -> Written:
    """Write a series into a folder."""
    known = stored or StoredShards(folder)
    return write_series(TEXT, keys, encode, known, folder=folder, shard_size=shard_size)


def publish(written: Written, folder: Path) -> dict[str, bytes]:
    """Name the shards and list them in an index; returns their bytes."""
    folder.mkdir(exist_ok=True)
    place(written, folder)
    none = type(written.series)(1, (), ())
    write_index(folder, Index(8, "fp32", 1, (), KEYS[0], none, written.series, data_sha256=KEYS[0]))
    return {file: (folder / file).read_bytes() for file in written.paths}


def test_shards_hold_their_key_range_within_the_size(tmp_path):
    written = write(tmp_path)
    count = written.series.count
    assert count in (16, 32)
    assert (written.total, written.encoded) == (60, 60)
    files = publish(written, tmp_path)
    seen = []
    for file, data in files.items():
        assert len(data) <= 4096
        number = int(file.split("-")[1])
        assert file == f"text-{number:05d}-of-{count:05d}.safetensors"
        with safe_open(tmp_path / file, framework="pt") as shard:
            keys = {key_of(name) for name in shard.keys()}  # noqa: SIM118
        assert {shard_number(key, count) for key in keys} == {number}
        seen += keys
    assert sorted(seen) == sorted(KEYS)
    assert [shard.sha256 for shard in written.series.shards] == [
        hashlib.sha256(data).hexdigest() for data in files.values()
    ]


def test_one_shard_where_it_is_large_enough(tmp_path):
    assert [s.file for s in write(tmp_path, shard_size=2**20).series.shards] == [
        "text-00000-of-00001.safetensors"
    ]


def test_bytes_depend_on_keys_alone_not_on_order_or_on_what_was_stored(tmp_path):
    scratch = publish(write(tmp_path / "scratch"), tmp_path / "scratch")
    some = KEYS[5:35]
    publish(write(tmp_path / "grown", some), tmp_path / "grown")
    grown = write(tmp_path / "grown", KEYS[::-1] + KEYS[:3])
    assert grown.encoded == 30
    assert publish(grown, tmp_path / "grown2") == scratch
    shrunk = write(tmp_path / "scratch", some, encode=refuse)
    assert shrunk.encoded == 0
    assert publish(shrunk, tmp_path / "shrunk") == publish(
        write(tmp_path / "some", some), tmp_path / "some"
    )


def uneven(keys: Sequence[str]) -> Iterator[Tensors]:
    """Tensors of 1 to 31 rows, as captions of their own lengths have them."""
    for key in keys:
        yield {"embeds": torch.full((1 + int(key[:2], 16) % 31, 8), float(int(key[:4], 16)))}


@pytest.mark.parametrize("shard_size", [2048, 8192, 2**20])
def test_keys_of_their_own_sizes_stay_within_the_shards(tmp_path, shard_size):
    """Whatever the first one takes; the same bytes whether or not some were stored before."""
    written = write(tmp_path / "whole", encode=uneven, shard_size=shard_size)
    whole = publish(written, tmp_path / "whole")
    assert max(len(data) for data in whole.values()) <= shard_size
    partial = list((tmp_path / "whole" / "partial").iterdir())
    assert max(path.stat().st_size for path in partial) <= shard_size
    halves: dict[int, int] = {}
    for key, tensors in zip(KEYS, uneven(KEYS), strict=True):
        half = shard_number(key, written.series.count) // 2
        halves[half] = halves.get(half, 0) + tensors["embeds"].nbytes + 256
    assert written.series.count == 1 or max(halves.values()) > shard_size
    publish(write(tmp_path / "grown", KEYS[5:35], encode=uneven, shard_size=shard_size),
            tmp_path / "grown")  # fmt: skip
    grown = write(tmp_path / "grown", encode=uneven, shard_size=shard_size)
    assert (grown.total, grown.encoded) == (60, 30)
    assert publish(grown, tmp_path / "grown2") == whole


def test_a_shard_that_stays_the_same_is_not_written_again(tmp_path):
    publish(write(tmp_path), tmp_path)
    inodes = {file.stat().st_ino for file in tmp_path.glob("text-*")}
    again = write(tmp_path, encode=refuse)
    assert {path.stat().st_ino for path in again.paths.values()} == inodes


def test_a_killed_run_keeps_its_finished_shards(tmp_path):
    whole = publish(write(tmp_path / "whole"), tmp_path / "whole")

    def killed(keys: Sequence[str]) -> Iterator[Tensors]:
        yield from make(keys[:40])
        raise KeyboardInterrupt

    folder = tmp_path / "cache"
    publish(write(tmp_path / "before", KEYS[:1]), folder)
    with pytest.raises(KeyboardInterrupt):
        write(folder, encode=killed)
    rest = write(folder)
    assert 20 <= rest.encoded < 30
    assert publish(rest, tmp_path / "cache") == whole


def test_a_broken_index_is_no_obstacle(tmp_path):
    (tmp_path / "index.json").write_text("{")
    assert write(tmp_path).encoded == 60


def test_a_shard_size_below_one_sample_is_refused(tmp_path):
    with pytest.raises(PipelineError) as caught:
        write_series(LATENTS, KEYS, make, StoredShards(tmp_path), folder=tmp_path, shard_size=500)
    assert caught.value.what == (
        "cache.shard_size: 500 bytes cannot hold one sample's latents, 616 bytes"
    )
