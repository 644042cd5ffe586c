"""The trained part of an image: the centre square, scaled."""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image


def centre_crop(size: tuple[int, int]) -> tuple[int, int, int]:
    """Compute left, top and side of the largest centred square in an image of (width, height)."""
    width, height = size
    side = min(width, height)
    return (width - side) // 2, (height - side) // 2, side


def limit_pixels(size: tuple[int, int], max_pixels: int | None) -> tuple[int, int]:
    """Scale (width, height) down to an area of at most max_pixels, keeping the aspect ratio."""
    width, height = size
    if max_pixels is None or width * height <= max_pixels:
        return size
    scale = sqrt(max_pixels / (width * height))
    width, height = max(1, int(width * scale)), max(1, int(height * scale))
    return min(width, max_pixels), min(height, max_pixels)


def crop_and_resize(image: Image, crop: tuple[int, int, int], resolution: int) -> Image:
    """Cut out the square (left, top, side) and scale it to resolution x resolution (Lanczos).

    Pillow uses integer arithmetic: equal images give equal bytes.
    """
    from PIL.Image import Resampling

    left, top, side = crop
    box = (left, top, left + side, top + side)
    if side == resolution:
        return image.crop(box)
    return image.resize((resolution, resolution), Resampling.LANCZOS, box=box)


def to_pixels(image: Image) -> np.ndarray:
    """Convert an RGB image to float32 [3, H, W] in [-1, 1], as autoencoders expect it."""
    import numpy as np

    pixels = np.asarray(image, dtype=np.float32) / 127.5 - 1
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))
