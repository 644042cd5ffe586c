"""Crop and resize: whole-number promises on boxes, sizes and pixels."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from zerotrain.data.buckets import centre_crop, crop_and_resize, limit_pixels, to_pixels


@pytest.mark.parametrize(
    ("size", "crop"),
    [((10, 10), (0, 0, 10)), ((13, 10), (1, 0, 10)), ((10, 15), (0, 2, 10)), ((1, 1), (0, 0, 1))],
)
def test_the_crop_is_the_largest_centred_square(size, crop):
    assert centre_crop(size) == crop


@pytest.mark.parametrize(
    ("size", "limit", "limited"),
    [
        ((400, 200), None, (400, 200)),
        ((400, 200), 80000, (400, 200)),
        ((400, 200), 20000, (200, 100)),
        ((1, 100000), 64, (1, 64)),
    ],
)
def test_the_area_is_capped_and_the_aspect_kept(size, limit, limited):
    assert limit_pixels(size, limit) == limited
    assert limit is None or limited[0] * limited[1] <= limit


def test_a_crop_of_the_right_size_is_not_resampled():
    values = np.random.default_rng(0).integers(0, 256, (6, 10, 3), dtype=np.uint8)
    cut = crop_and_resize(Image.fromarray(values), (2, 0, 6), 6)
    np.testing.assert_array_equal(np.asarray(cut), values[:, 2:8])


def test_resizing_takes_the_crop_and_keeps_its_mean():
    values = np.zeros((40, 80, 3), dtype=np.uint8)
    values[:, 8:72] = 90  # Lanczos looks 12 pixels beyond the crop at this scale
    small = np.asarray(crop_and_resize(Image.fromarray(values), (24, 4, 32), 8))
    assert small.shape == (8, 8, 3)
    np.testing.assert_array_equal(small, 90)


def test_pixels_are_channels_first_from_minus_one_to_one():
    image = Image.new("RGB", (2, 1), (0, 255, 51))
    pixels = to_pixels(image)
    assert pixels.dtype == np.float32
    np.testing.assert_allclose(pixels[:, 0, 1], [-1, 1, -0.6], atol=1e-6)
    assert pixels.shape == (3, 1, 2)
