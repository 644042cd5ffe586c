"""Transparent pixels of image files."""

from __future__ import annotations

import io

from PIL import Image, ImageOps

from zerotrain.data.decode import FORMATS


def read_alpha(data: bytes) -> Image.Image | None:
    """Return the upright opacity of an image in 8 bits; None if every pixel is opaque.

    Greys of more than 8 bits have no alpha, and decode ignores their transparent value.

    Args:
        data: The file's bytes, which decode accepts.
    """
    with Image.open(io.BytesIO(data), formats=[*FORMATS]) as image:
        if not image.has_transparency_data or image.mode.startswith("I"):
            return None
        alpha = ImageOps.exif_transpose(image).convert("RGBA").getchannel("A")
        return alpha if alpha.histogram()[255] < alpha.width * alpha.height else None
