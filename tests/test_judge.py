"""The judge of images, on the scans that it judges in the example."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from zerotrain.config.data import DataConfig
from zerotrain.data.open import open_source
from zerotrain.evaluation.images import Judge, pixel_vectors


@pytest.fixture(scope="module")
def scans() -> tuple[list[Image.Image], list[str]]:
    """The handwritten digits with their captions."""
    source = open_source(DataConfig(source="digits"))
    found = source.found()
    images = [source.image_of(entry.file, source.sha256(entry.file)) for entry in found]
    return images, [entry.caption for entry in found]


def test_the_judge_knows_digits_that_it_has_not_seen(scans):
    """Fitted on every second scan it names at least 97 of 100 others."""
    images, captions = scans
    judge = Judge(images[::2], captions[::2])
    assert judge.accuracy(images[1::2], captions[1::2]) >= 0.97
    assert len(judge.captions) == 10


def test_the_judge_is_not_moved_by_noise_but_by_the_wrong_caption(scans):
    """Noise scores as chance does; right images with rotated captions score near zero."""
    images, captions = scans
    judge = Judge(images[::2], captions[::2])
    draw = np.random.default_rng(0)
    noise = [
        Image.fromarray(draw.integers(0, 256, (32, 32, 3), dtype=np.uint8)) for _ in range(100)
    ]
    asked = [name for name in judge.captions for _ in range(10)]
    assert judge.accuracy(noise, asked) <= 0.2
    names = judge.captions
    wrong = [names[(names.index(caption) + 1) % 10] for caption in captions[1::20]]
    assert judge.accuracy(images[1::20], wrong) <= 0.02


def test_the_judge_sees_grey_pixels_whatever_the_size():
    """An image and its enlargement give one vector, in [0, 1]."""
    small = Image.linear_gradient("L").resize((16, 16)).convert("RGB")
    first, second = pixel_vectors([small, small.resize((64, 64), Image.Resampling.NEAREST)])
    assert np.array_equal(first, second)
    assert first.shape == (256,)
    assert 0 <= first.min() < first.max() <= 1


def test_fewer_images_than_neighbours_are_enough():
    red, white = (Image.new("RGB", (8, 8), name) for name in ("black", "white"))
    judge = Judge([red, white], ["dark", "bright"])
    assert judge.accuracy([white, red], ["bright", "dark"]) == 1.0
