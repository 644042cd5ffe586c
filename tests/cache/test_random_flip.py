"""data.random_flip: both images of a pair are encoded, and training draws one of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from PIL import Image
from pyarrow import ipc
from tests.builders.caching import encode_pixels, pixel_run

from zerotrain.config.training import TrainConfig
from zerotrain.training.batches import Batches

SIDE, COUNT = 16, 12


def test_mirror_images_are_encoded_and_drawn(tmp_path: Path) -> None:
    """Only of training samples; without the key the cache is what it was."""
    images = tmp_path / "images"
    images.mkdir()
    for number in range(COUNT):
        image = Image.linear_gradient("L").rotate(25 * number + 30).resize((SIDE, SIDE))
        image.convert("RGB").save(images / f"{number}.png")
        (images / f"{number}.txt").write_text("a picture")
    flipped = encode_pixels(
        pixel_run(images, SIDE, holdout=0.5, random_flip=True), SIDE, tmp_path / "flipped"
    )
    plain = encode_pixels(pixel_run(images, SIDE, holdout=0.5), SIDE, tmp_path / "plain")
    trained = [i for i, entry in enumerate(flipped.entries) if entry.split == "train"]
    assert 0 < len(trained) < COUNT
    for i, (one, other) in enumerate(zip(flipped.entries, plain.entries, strict=True)):
        assert one.latents == other.latents
        assert (one.flipped is not None) == (i in trained)
        assert other.flipped is None
    with ipc.open_file(tmp_path / "plain" / "cache" / "index.arrow") as columns:
        assert "flipped" not in columns.schema.names
    for i in trained:
        mirrored = flipped.sample(i, flipped=True)["latents"]
        assert torch.equal(mirrored, flipped.sample(i)["latents"].flip(-1))
    phase: Any = SimpleNamespace(
        seed=3,
        derived=SimpleNamespace(epoch_size=len(trained), objective={}),
        train=TrainConfig(caption_dropout_probability=0.0, global_batch_size=1),
    )
    seen = {
        bool(torch.equal(batch, flipped.sample(i)["latents"]))
        for position in range(40)
        for batch in [Batches(flipped, phase).batch(position, 1, torch.device("cpu"))["latents"][0]]
        for i in trained
        if torch.equal(batch, flipped.sample(i)["latents"])
        or torch.equal(batch, flipped.sample(i, flipped=True)["latents"])
    }
    assert seen == {True, False}
