"""data.aspect_buckets: what is encoded of each image, and what an edit encodes again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.builders.caching import encode_pixels, pixel_run

from zerotrain.cache.reader import Cache

SIDE = 32
SIZES = [(40, 40), (80, 24), (20, 60), (300, 40)]
BUCKETS = {"alignment": 8, "min_aspect": 0.25, "max_aspect": 4.0}


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Twelve images of four shapes."""
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(12):
        draw_image(number).save(folder / f"{number:02d}.png")
        (folder / f"{number:02d}.txt").write_text("a picture")
    return folder


def draw_image(number: int) -> Image.Image:
    width, height = SIZES[number % len(SIZES)]
    pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def encode(images: Path, folder: Path, **data: Any) -> Cache:
    return encode_pixels(pixel_run(images, SIDE, **data), SIDE, folder)


def test_an_image_is_encoded_in_the_shape_of_its_bucket(images, tmp_path):
    """The latents of this model are pixels: those of the centre, scaled."""
    cache = encode(images, tmp_path, aspect_buckets=BUCKETS)
    found = {entry.file: entry for entry in cache.entries}
    assert [found[f"{n:02d}.png"].target_size for n in range(4)] == [
        (32, 32), (16, 56), (48, 16), (16, 64),
    ]  # fmt: skip
    for i, entry in enumerate(cache.entries):
        height, width = entry.target_size
        image = draw_image(int(entry.file[:2]))
        own = min(image.width, round(image.height * width / height))
        tall = min(image.height, round(image.width * height / width))
        left, top = (image.width - own) // 2, (image.height - tall) // 2
        box = (left, top, left + own, top + tall)
        scaled = image.resize((width, height), Image.Resampling.LANCZOS, box=box)
        expected = torch.from_numpy(np.array(scaled)).permute(2, 0, 1) / 127.5 - 1
        latents = cache.sample(i)["latents"]
        assert latents.shape[-2:] == (height, width)
        torch.testing.assert_close(latents.reshape(expected.shape), expected, atol=1e-6, rtol=0)
        assert entry.crop_top_left == (round(top * height / tall), round(left * width / own))


def test_only_what_is_cut_otherwise_is_encoded_again(images, tmp_path, capsys):
    """Squares keep their latents when buckets are switched on; an edit encodes one image."""

    def encoded(**data: Any) -> str:
        capsys.readouterr()
        encode(images, tmp_path, **data)
        return capsys.readouterr().out.splitlines()[-1].partition(",")[0]

    assert encoded() == "encoded 12 of 12 latents"
    assert encoded(aspect_buckets=BUCKETS) == "encoded 9 of 12 latents"
    assert encoded(aspect_buckets=BUCKETS) == "encoded 0 of 12 latents"
    assert encoded(aspect_buckets={**BUCKETS, "max_aspect": 2.0}) == "encoded 6 of 12 latents"
    encoded(aspect_buckets=BUCKETS)
    draw_image(100).resize((80, 24)).save(images / "01.png")
    assert encoded(aspect_buckets=BUCKETS) == "encoded 1 of 12 latents"
    (images / "05.png").rename(images / "55.png")
    (images / "05.txt").rename(images / "55.txt")
    assert encoded(aspect_buckets=BUCKETS) == "encoded 0 of 12 latents"


def test_the_bytes_depend_neither_on_workers_nor_on_what_was_reused(images, tmp_path):
    """Nor on the window in which images are encoded out of order."""
    first = encode(images, tmp_path / "a", aspect_buckets=BUCKETS)
    encode(images, tmp_path / "b", num_workers=3)
    second = encode(images, tmp_path / "b", aspect_buckets=BUCKETS, num_workers=3)
    assert {file: one["sha256"] for file, one in first.artifact.files.items()} == {
        file: one["sha256"] for file, one in second.artifact.files.items()
    }
