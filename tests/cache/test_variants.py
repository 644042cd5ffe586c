"""Stored variants of samples: what is encoded, what an edit encodes again, what a turn draws."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zerotrain.cache.reader import read_cache
from zerotrain.config.training import TrainConfig
from zerotrain.data.dataset import read_dataset
from zerotrain.data.draws import draw_variant
from zerotrain.errors import PipelineError
from zerotrain.training.batches import Batches
from zerotrain.training.checkpointing.conditions import data_digest

TAGGED = {"shuffle_caption": True, "caption_variants": 3}
CPU = torch.device("cpu")


def make_phase(count: int, seed: int = 3) -> Any:
    return SimpleNamespace(
        seed=seed,
        derived=SimpleNamespace(epoch_size=count, objective={}),
        train=TrainConfig(caption_dropout_probability=0.0, global_batch_size=1),
    )


def write_captions(run, count: int = 20) -> None:
    for number in range(count):
        (run.images / f"{number:02d}.txt").write_text(f"a, b, c, d, e, f, g, h {number}")


def test_an_edited_caption_encodes_its_variants_alone(run, family, capsys):
    """3 variants of each training caption, one of each held-out one; 2 edits encode 6 again."""
    write_captions(run)
    run.cache(data=TAGGED)
    samples = read_dataset(run.folder / "dataset").samples
    trained = [sample.file for sample in samples if sample.split == "train"]
    assert 0 < len(trained) < 20
    encoded = 3 * len(trained) + 20 - len(trained) + 1  # and the empty caption
    assert f", {encoded} of {encoded} captions;" in capsys.readouterr().out
    for file in trained[:2]:
        (run.images / file).with_suffix(".txt").write_text(f"z, y, x, w, v, u, t, s {file}")
    run.cache(data=TAGGED)
    assert f"encoded 0 of 20 latents, 6 of {encoded} captions" in capsys.readouterr().out


def test_a_turn_draws_one_variant_by_seed_epoch_and_place(run, family):
    """The embeddings of a batch are those of the variant that draw_variant names."""
    write_captions(run)
    cache = read_cache(run.cache(data=TAGGED))
    trained = [i for i, entry in enumerate(cache.entries) if entry.split == "train"]
    count = len(trained)
    batches = Batches(cache, make_phase(count))
    seen = set()
    for position in range(3 * count):
        [embeds] = batches.batch(position, 1, CPU)["prompt_embeds"]
        epoch, place = batches._order.place(position)
        number = trained[place]
        variant = int(draw_variant(3, epoch, place).caption * 3)
        seen.add(variant)
        assert torch.equal(embeds, cache.sample(number, caption=variant)["prompt_embeds"])
        again = Batches(cache, make_phase(count), first=position)
        assert torch.equal(again.batch(position, 1, CPU)["prompt_embeds"][0], embeds)
    assert seen == {0, 1, 2}


def test_what_a_turn_can_draw_decides_what_is_trained(run, family):
    """Another number of variants is other data to a training; without the keys nothing is."""
    write_captions(run)
    plain = run.cache("plain")
    digests = {
        data_digest(read_cache(run.cache(f"v{n}", data={**TAGGED, "caption_variants": n})).artifact)
        for n in (1, 2, 3)
    }
    assert len(digests) == 3
    assert b"other_" not in (plain / "index.arrow").read_bytes()
    assert b"other_texts" in (run.folder / "v2/index.arrow").read_bytes()
    assert data_digest(read_cache(plain).artifact) not in digests


def test_draws_of_variants_are_numbers_for_ever():
    found = draw_variant(1, 2, 12345)
    assert (found.caption, found.view) == pytest.approx((0.509570416312, 0.621015885071))


CROPS = {"alignment": 8, "crop": "random", "sizes": [[16, 8]], "crop_variants": 3}


def test_parts_of_an_image_are_encoded_and_drawn(run, family, capsys):
    """3 parts of each training image, and their mirror images; the first is that of one variant."""
    one = read_cache(run.cache("one", data={"aspect_buckets": {**CROPS, "crop_variants": 1}}))
    cache = read_cache(run.cache("three", data={"aspect_buckets": CROPS, "random_flip": True}))
    trained = [i for i, entry in enumerate(cache.entries) if entry.split == "train"]
    parts = {key for one in cache.entries for key in (one.latents, *(one.other_latents or ()))}
    mirrored = {
        key for i in trained for key in (cache.entries[i].flipped, *cache.entries[i].other_flipped)
    }
    encoded = len(parts | mirrored)
    assert encoded > 5 * len(trained) + 20 - len(trained)  # some draws are of the same part
    assert f"encoded {encoded} of {encoded} latents" in capsys.readouterr().out
    for i, (entry, first) in enumerate(zip(cache.entries, one.entries, strict=True)):
        assert (entry.latents, entry.crop_top_left) == (first.latents, first.crop_top_left)
        assert (entry.other_latents is not None) == (i in trained)
        assert first.other_latents is first.other_crops is None
    batches = Batches(cache, make_phase(len(trained)))
    seen = set()
    for position in range(4 * len(trained)):
        batch = batches.batch(position, 1, CPU)
        epoch, place = batches._order.place(position)
        number = trained[place]
        view = int(draw_variant(3, epoch, place).view * 3)
        entry = cache.entries[number]
        crops = [*entry.crop_top_left, *entry.other_crops]
        assert batch["crop_top_left"][0].tolist() == crops[2 * view : 2 * view + 2]
        wanted = [cache.sample(number, view=view, flipped=f)["latents"] for f in (False, True)]
        found = [torch.equal(batch["latents"][0], latents) for latents in wanted]
        assert any(found)
        seen.add((view, *found))
    assert len(seen) == 6


def test_variants_of_a_fixed_crop_are_refused(run):
    with pytest.raises(PipelineError, match="differ only with crop: random"):
        run.config({"aspect_buckets": {"crop_variants": 2}})
