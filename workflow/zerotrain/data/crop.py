"""Which part of an image is trained on, and at what size: the centre square, scaled."""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image


def centre_crop(size: tuple[int, int]) -> tuple[int, int, int]:
    """Left, top and side of the largest centred square in an image of (width, height)."""
    width, height = size
    side = min(width, height)
    return (width - side) // 2, (height - side) // 2, side


def limit_pixels(size: tuple[int, int], max_pixels: int | None) -> tuple[int, int]:
    """(width, height) scaled down to an area of at most max_pixels; the aspect is kept."""
    width, height = size
    if max_pixels is None or width * height <= max_pixels:
        return size
    scale = sqrt(max_pixels / (width * height))
    width, height = max(1, int(width * scale)), max(1, int(height * scale))
    return min(width, max_pixels), min(height, max_pixels)


def crop_and_resize(image: Image, crop: tuple[int, int, int], resolution: int) -> Image:
    """Cut the square (left, top, side) and scale it to resolution x resolution (Lanczos).

    Pillow computes it in whole numbers: equal images give equal bytes.
    """
    from PIL.Image import Resampling

    left, top, side = crop
    box = (left, top, left + side, top + side)
    if side == resolution:
        return image.crop(box)
    return image.resize((resolution, resolution), Resampling.LANCZOS, box=box)


def to_pixels(image: Image) -> np.ndarray:
    """An RGB image to float32 [3, H, W] in [-1, 1], as autoencoders expect it."""
    import numpy as np

    pixels = np.asarray(image, dtype=np.float32) / 127.5 - 1
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))
