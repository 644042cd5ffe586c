"""Weights, masks and backgrounds of images in dataset and cache."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from tests.builders.caching import Run
from tests.builders.refusals import refused

from zerotrain.cache import sample_keys
from zerotrain.cache.reader import read_cache, stacked
from zerotrain.cache.reuse import orphan_shards
from zerotrain.data.dataset import read_dataset
from zerotrain.errors import PipelineError
from zerotrain.stages import cache_latents
from zerotrain.stages.prepare_dataset import prepare_dataset
from zerotrain.training.checkpointing.conditions import data_digest


@pytest.fixture
def run(run) -> Run:
    """Twenty opaque images; the first two are replaced by half transparent ones."""
    for number in range(2):
        pixels = np.full((32, 32, 4), 40 * number, np.uint8)
        pixels[..., 3] = 255
        pixels[:, :16, 3] = 0
        Image.fromarray(pixels).save(run.images / f"{number:02d}.png")
    return run


def test_a_weight_is_in_every_sample_and_changes_no_key(run, family):
    plain = read_cache(run.cache("plain"))
    cache = read_cache(run.cache("weighted", data={"loss_weight": 0.5}))
    assert [one.latents for one in cache.entries] == [one.latents for one in plain.entries]
    assert cache.sample(3)["loss_weight"] == torch.tensor(0.5)
    assert "loss_weight" not in plain.sample(3)
    assert data_digest(cache.artifact) != data_digest(plain.artifact)
    assert b"loss_weight" not in (run.folder / "plain/index.arrow").read_bytes()
    assert b"loss_weight" in (run.folder / "weighted/index.arrow").read_bytes()


def test_alpha_is_the_mask_of_its_latents(run, family, capsys):
    """The transparent half is 0; opaque images count whole; a mirror image has its mirrored."""
    data = {"loss_mask": "alpha", "random_flip": True, "holdout": 0.0}
    cache = read_cache(run.cache(data=data))
    assert "2 of 2 loss masks" in capsys.readouterr().out
    half = torch.tensor([0.0, 0, 1, 1]).expand(1, 4, 4)
    assert torch.equal(cache.sample(0)["loss_mask"], half)
    assert torch.equal(cache.sample(0, flipped=True)["loss_mask"], half.flip(-1))
    assert torch.equal(cache.sample(5)["loss_mask"], torch.ones(1, 4, 4))
    plain = read_cache(run.cache("plain", data={"random_flip": True, "holdout": 0.0}))
    assert [one.latents for one in cache.entries] == [one.latents for one in plain.entries]
    assert "loss_mask" not in plain.sample(0)
    assert data_digest(cache.artifact) != data_digest(plain.artifact)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_masks_of_16_bits_are_next_to_none_in_a_batch(run, family, dtype):
    """A mask in use is no orphan, and a batch has those of all its samples as float32."""
    cache = read_cache(run.cache(data={"loss_mask": "alpha", "holdout": 0.0}, dtype=dtype))
    samples = [cache.sample(number) for number in (0, 5)]
    masks = stacked(samples, torch.device("cpu"))["loss_mask"]
    assert masks.dtype == torch.float32
    assert torch.equal(masks, torch.stack([one["loss_mask"] for one in samples]))
    assert torch.equal(masks[1], torch.ones(1, 4, 4))
    assert masks[0].unique().tolist() == [0.0, 1.0]
    run.cache(data={"loss_mask": "alpha", "holdout": 0.0}, dtype=dtype)
    assert not orphan_shards(run.folder / "cache")


def test_a_mask_image_is_cut_and_scaled_as_its_image(run, family, capsys):
    """An edited mask is scaled again, but no image is encoded; another size is refused."""
    masks = run.folder / "masks"
    masks.mkdir()
    for file in sorted(run.images.glob("*.png")):
        with Image.open(file) as image:
            mask = Image.new("L", image.size, 255)
        mask.paste(0, (0, 0, mask.width, 15))
        mask.save(masks / file.name)
    data = {"mask_images": str(masks), "holdout": 0.0}
    cache = read_cache(run.cache(data=data))
    rows = cache.sample(19)["loss_mask"][0, :, 0]  # 43x30 pixels, of which the middle 30 are cut
    assert rows.tolist() == pytest.approx([0, 0, 1, 1])
    capsys.readouterr()
    Image.new("L", (43, 30), 51).save(masks / "19.png")
    cache = read_cache(run.cache(data=data))
    assert "encoded 0 of 20 latents, 0 of 4 captions, 1 of 20 loss masks" in capsys.readouterr().out
    assert cache.sample(19)["loss_mask"].unique().tolist() == pytest.approx([0.2])
    Image.new("L", (30, 30)).save(masks / "19.png")
    (masks / "18.png").unlink()
    said = str(refused(prepare_dataset, run.config(data).data, run.folder / "other"))
    assert "19.png: mask 19.png in" in said
    assert "has 30x30 pixels and its image 43x30" in said
    assert "18.png: no mask: no 18.* in" in said


def test_a_raised_version_compares_masks_too(run, family, capsys, monkeypatch):
    """Equal ones are kept, others are scaled again."""
    data = {"loss_mask": "alpha", "holdout": 0.0}
    run.cache(data=data)
    present = cache_latents.present
    monkeypatch.setattr(
        cache_latents, "present", lambda *words: replace(present(*words), stage=number)
    )
    capsys.readouterr()
    number = 2
    run.cache(data=data)
    said = capsys.readouterr().out
    assert re.search(r"version 1 -> version 2\): \d+ loss masks are kept", said)
    number = 3
    read = sample_keys.read_mask
    monkeypatch.setattr(sample_keys, "read_mask", lambda *args: 1 - read(*args))
    run.cache(data=data)
    said = capsys.readouterr().out
    assert "loss masks are encoded again; those of" in said
    assert "encoded 0 of 20 latents" in said


def test_a_background_is_behind_transparent_images_alone(run, family, capsys):
    """Two of twenty images are encoded again, over the colour."""
    plain = read_cache(run.cache(data={"holdout": 0.0}))
    assert plain.sample(0)["latents"][:, 0, 0].tolist() == [1, 1, 1]
    assert '"background"' not in (run.folder / "dataset/manifest.json").read_text()
    before = data_digest(plain.artifact)
    capsys.readouterr()
    data = {"transparent_background": "#FF0000", "holdout": 0.0}
    cache = read_cache(run.cache(data=data))
    assert "encoded 2 of 20 latents" in capsys.readouterr().out
    assert cache.sample(0)["latents"][:, 0, 0].tolist() == [1, -1, -1]
    samples = read_dataset(run.folder / "dataset").samples
    assert [one.background for one in samples] == ["#ff0000"] * 2 + [None] * 18
    assert data_digest(cache.artifact) != before


def test_masks_of_the_digits_and_two_kinds_of_masks_are_refused(run):
    with pytest.raises(PipelineError, match="digits has opaque images and no masks; remove loss_m"):
        run.config({"source": "digits", "images": None, "loss_mask": "alpha"})
    with pytest.raises(PipelineError, match="give loss_mask or mask_images, not both"):
        run.config({"loss_mask": "alpha", "mask_images": "masks"})
