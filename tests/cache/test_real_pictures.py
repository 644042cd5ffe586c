"""Photographs, icons and emoji: prepared, put into buckets and encoded, each with its numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.builders.images import make_image_config, prepare_inputs
from tests.builders.real_pictures import EMOJI, FILES, write_real_pictures

from zerotrain.cache.reader import Cache, read_cache
from zerotrain.data.buckets import choose_views, to_pixels
from zerotrain.data.dataset import read_dataset
from zerotrain.data.open import open_source
from zerotrain.models.families.sdxl import FAMILY as SDXL
from zerotrain.stages.prepare_dataset import prepare_dataset

SIDE = 64
BUCKETS = {"alignment": 16, "min_aspect": 0.25, "max_aspect": 4.0}
SIZES = {
    "china.jpg": ((640, 427), (80, 48)),
    "flower.jpg": ((640, 427), (80, 48)),
    "portrait.jpg": ((512, 600), (64, 64)),
    "logo.png": ((542, 130), (128, 32)),
    "home.png": ((48, 48), (64, 64)),
    "hand.png": ((24, 24), (64, 64)),
    **{f"emoji/{number}.webp": ((72, 72), (64, 64)) for number in range(len(EMOJI))},
}
"""Width and height of each picture and of its bucket."""
CROPS = {
    "china.jpg": (round(21 * 48 / 384), 0),  # 640x384 of 640x427
    "flower.jpg": (round(21 * 48 / 384), 0),
    "portrait.jpg": (round(44 * 64 / 512), 0),
    "logo.png": (0, round(11 * 128 / 520)),
}
"""What is cut from top and left, in pixels of the bucket."""


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_real_pictures(tmp_path_factory.mktemp("real") / "pictures")


def cut_by_pillow(folder: Path, file: str) -> Image.Image:
    """The centre of a picture, in the shape and the size of its bucket, by Pillow alone."""
    image = Image.open(folder / file).convert("RGBA")
    over = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    width, height = SIZES[file][1]
    own = min(image.width, round(image.height * width / height))
    tall = min(image.height, round(image.width * height / width))
    left, top = (image.width - own) // 2, (image.height - tall) // 2
    box = (left, top, left + own, top + tall)
    return over.resize((width, height), Image.Resampling.LANCZOS, box=box)


def test_pictures_are_cut_to_their_buckets(pictures: Path, tmp_path: Path, capsys) -> None:
    """Sizes, captions, buckets and crops are those computed here; the pixels are Pillow's."""
    config = make_image_config(pictures, data={"aspect_buckets": BUCKETS})
    prepare_dataset(config.data, tmp_path, SIDE)
    assert "aspect buckets: 3 sizes, images of each: 64x64 (9), 80x48 (2), 128x32 (1)" in (
        capsys.readouterr().out
    )
    samples = read_dataset(tmp_path).samples
    assert {one.file: one.original_size for one in samples} == {f: s[0] for f, s in SIZES.items()}
    assert {one.caption for one in samples} == {
        *(caption for _, caption in FILES.values()),
        *(f"{emoji} {caption}" for emoji, (caption, _) in EMOJI.items()),
    }
    source = open_source(config.data)
    for sample, view in zip(
        samples, choose_views(samples, SIDE, config.data.aspect_buckets), strict=True
    ):
        assert view.size == SIZES[sample.file][1]
        assert view.crop_top_left == CROPS.get(sample.file, (0, 0))
        found = view.cut(source.image_of(sample.file, sample.image_sha256))
        expected = np.asarray(cut_by_pillow(pictures, sample.file))
        assert np.array_equal(np.asarray(found), expected)
        assert np.asarray(found).mean() == pytest.approx(expected.mean())


@pytest.mark.slow
def test_an_sdxl_encodes_them_and_says_which_caption_is_cut(
    pictures: Path, tmp_path: Path, capsys
) -> None:
    """As its own encoders do alone; a caption of 100 KB in several
    scripts is counted."""
    folder = write_real_pictures(tmp_path / "pictures")
    long = "قطة حمراء, a red cat 👩‍🚀, 屋顶上的红猫; " * 1700
    (folder / "home.txt").write_text(long, encoding="utf-8")
    assert len(long.encode()) > 100_000
    data: dict[str, Any] = {"aspect_buckets": BUCKETS}
    config = make_image_config(folder, data=data, train={"resolution": SIDE})
    prepare_inputs(config, tmp_path, SIDE)
    assert "1 of 12 captions exceed 32 tokens; the excess is ignored" in capsys.readouterr().out
    cache = read_cache(tmp_path / "cache")
    assert isinstance(cache, Cache)
    assert {entry.file: entry.target_size for entry in cache.entries} == {
        file: (height, width) for file, (_, (width, height)) in SIZES.items()
    }
    encoders = SDXL.load_encoders(tmp_path / "base", "cpu")
    for i, entry in enumerate(cache.entries):
        cut = torch.from_numpy(to_pixels(cut_by_pillow(folder, entry.file)))[None]
        latents = cache.sample(i)["latents"][None]
        torch.testing.assert_close(encoders.encode_images(cut), latents, rtol=1e-4, atol=1e-5)
