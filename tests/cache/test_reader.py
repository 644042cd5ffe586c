"""What a cache's index and shards hold, and batches of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import save_file
from tests.builders.caching import contents

from zerotrain import artifact
from zerotrain.artifact.documents import DocumentError
from zerotrain.cache.layout import (
    Entry,
    Index,
    Series,
    Shard,
    drawn_digest,
    listed_shards,
    read_index,
    write_index,
)
from zerotrain.cache.reader import MappedShard, stacked
from zerotrain.cache.record import carry_index, same_index

CPU = torch.device("cpu")


def test_samples_of_one_shape_are_stacked_as_they_are() -> None:
    samples = [{"latents": torch.ones(2, 3) * i, "uniform": torch.tensor(0.5 * i)} for i in (1, 2)]
    batch = stacked(samples, CPU)
    assert batch.keys() == {"latents", "uniform"}
    assert batch["latents"].shape == (2, 2, 3)
    assert torch.equal(batch["uniform"], torch.tensor([0.5, 1.0]))


def test_captions_of_their_own_lengths_are_filled_up_under_a_mask() -> None:
    """The mask is true where a tensor is the sample's own."""
    captions = [torch.full((length, 4), float(length)) for length in (1, 3, 2)]
    batch = stacked([{"prompt_embeds": caption} for caption in captions], CPU)
    assert batch["prompt_embeds"].shape == (3, 3, 4)
    mask = batch["prompt_embeds_mask"]
    assert mask.tolist() == [[True, False, False], [True, True, True], [True, True, False]]
    for row, caption in enumerate(captions):
        assert torch.equal(batch["prompt_embeds"][row][mask[row]], caption)
        assert not batch["prompt_embeds"][row][~mask[row]].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_floats_become_the_float32_that_torch_makes_of_them(dtype: torch.dtype) -> None:
    """Each of the 65,536 values, to the bit."""
    values = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(dtype)
    values = values[~values.isnan()]
    found = stacked([{"one": values, "two": values[:5]}, {"one": values, "two": values[7:9]}], CPU)
    expected = values.float().view(torch.int32)
    assert torch.equal(found["one"].view(torch.int32), expected.expand(2, -1))
    assert torch.equal(found["two"][1], torch.tensor([*values[7:9].float(), 0, 0, 0]))


def test_a_mapped_shard_has_the_tensors_that_safetensors_reads(tmp_path: Path) -> None:
    """Of several shapes and dtypes, as views of one mapping; a missing key is named."""
    keys = [artifact.digest(number) for number in range(9)]
    tensors = {
        f"{key}.{name}": torch.arange(2 * n + 2).reshape(2, -1).to(dtype) + n
        for n, key in enumerate(keys)
        for name, dtype in (("a", torch.bfloat16), ("b", torch.float32), ("c", torch.int32))
    }
    save_file(tensors, tmp_path / "shard", {"format": "pt"})
    shard = MappedShard(tmp_path / "shard", ("a", "b", "c"))
    for key in keys:
        for name, found in shard.tensors(key).items():
            expected = tensors[f"{key}.{name}"]
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected)
    one, two = (shard.tensors(keys[0])["b"] for _ in range(2))
    assert one.data_ptr() == two.data_ptr()
    assert one.untyped_storage().nbytes() == (tmp_path / "shard").stat().st_size
    with pytest.raises(DocumentError, match=f"has no {KEY}"):
        shard.tensors(KEY)


def test_a_mapped_shard_whose_bytes_are_not_those_of_its_shape_is_refused(tmp_path: Path) -> None:
    """Its views would show another tensor's numbers."""
    save_file({f"{KEY}.a": torch.ones(2, 3), f"{KEY}.b": torch.ones(4)}, tmp_path / "shard")
    data = (tmp_path / "shard").read_bytes()
    (tmp_path / "shard").write_bytes(data.replace(b"[2,3]", b"[3,2]"))  # as many numbers
    assert MappedShard(tmp_path / "shard", "ab").tensors(KEY)["a"].shape == (3, 2)
    for other in (b"[2,2]", b"[2,4]", b"[6,3]"):
        (tmp_path / "shard").write_bytes(data.replace(b"[2,3]", other))
        with pytest.raises(ValueError, match=f"shard: a of {KEY} has other bytes than its shape"):
            MappedShard(tmp_path / "shard", "ab")


def entry(number: int, **more: Any) -> Entry:
    keys = [artifact.digest([name, number]) for name in ("image", "caption", "latents", "text")]
    split: Literal["train", "holdout"] = "holdout" if number % 4 == 3 else "train"
    return Entry(f"{number}.png", *keys, (40, 30), (0, number), (32, 16), split, **more)


KEY = artifact.digest("a key")
SERIES = Series(2, ("latents",), (Shard("latents-00000-of-00002.safetensors", KEY),))
ENTRIES = (
    *map(entry, range(4)),
    entry(4, flipped=KEY),
    entry(5, conditioning=KEY, conditioning_sha256=(KEY, KEY), empty_text=KEY),
)
INDEXES = [
    Index(32, "bf16", 3, ENTRIES[:4], KEY, SERIES, SERIES, data_sha256=KEY),
    Index(32, "fp32", 1, ENTRIES, None, SERIES, SERIES, SERIES, data_sha256=KEY),
]


@pytest.mark.parametrize("index", INDEXES)
def test_an_index_has_the_samples_that_were_written(tmp_path: Path, index: Index) -> None:
    """In index.json its head, in columns its samples; other samples are another index."""
    write_index(tmp_path, index)
    assert read_index(tmp_path) == index
    assert [*read_index(tmp_path).entries] == [*index.entries]
    assert same_index(tmp_path, index)
    assert not same_index(tmp_path, replace(index, entries=index.entries[::-1]))
    assert listed_shards(tmp_path) == [*SERIES.shards] * (3 if index.conditioning else 2)


@pytest.mark.parametrize("number", [1, 3, None])
def test_an_index_of_another_format_is_refused(tmp_path: Path, number: int | None) -> None:
    """By its number, whatever else it has."""
    write_index(tmp_path, INDEXES[0])
    head = json.loads((tmp_path / "index.json").read_text())
    artifact.write_json(tmp_path / "index.json", {**head, "format": number})
    with pytest.raises(ValueError, match="not an index of format 2"):
        read_index(tmp_path)
    assert not same_index(tmp_path, INDEXES[0])


@pytest.mark.parametrize("count", [0, 3, -2, 2**33, 10**30, 2.5, {}, None, [1]])
def test_a_damaged_number_of_key_ranges_is_refused(tmp_path: Path, count: Any) -> None:
    """Keys and files are found by it: another number asks for any amount of memory."""
    write_index(tmp_path, INDEXES[0])
    head = json.loads((tmp_path / "index.json").read_text())
    head["latents"]["count"] = count
    artifact.write_json(tmp_path / "index.json", head)
    for read in (read_index, listed_shards):
        with pytest.raises(ValueError, match="count: "):
            read(tmp_path)


def test_an_unchanged_index_keeps_its_bytes_whatever_would_be_written_now(tmp_path: Path) -> None:
    """Another version of the library may write others; a damaged one is no index."""
    index = INDEXES[1]
    folder, draft = tmp_path / "cache", tmp_path / "draft"
    folder.mkdir()
    draft.mkdir()
    write_index(folder, index)
    carry_index(folder, draft, index, unchanged=True)
    assert contents(draft) == contents(folder)
    found = folder / "index.arrow"
    assert found.samefile(draft / "index.arrow")
    data = bytearray(found.read_bytes())
    data[-len(data) // 2] ^= 1
    found.unlink()
    found.write_bytes(data)
    assert not same_index(folder, index)


def test_the_digest_of_what_is_drawn_stays_what_it_is() -> None:
    """A rolling checkpoint names it: another one would set its progress aside."""
    found = [drawn_digest(ENTRIES[:n], "bf16", 77) for n in (0, 1, 6)]
    assert found == [
        "35df272a4410f37193d3e68b73cfaa1ef1e1b9e7c94b64c02679af3df58bc1f7",
        "6d788bcdf8e04487d35efa77407c800bd09b6f8dbc98206ed488079f8ddefad3",
        "06b0651ba9d8601ab1c98a6abb2aebe5cfcc86559c4b6d11dea3796a32ef4a0b",
    ]
