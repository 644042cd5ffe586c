"""Transparent pixels of image files."""

from __future__ import annotations

from PIL import Image

from zerotrain.data.decode import open_upright, parts_of


def read_alpha(data: bytes) -> Image.Image | None:
    """Return the upright opacity of an image in 8 bits; None if every pixel is opaque.

    Greys of more than 8 bits have no alpha, and decode ignores their transparent value.

    Args:
        data: The file's bytes, which decode accepts.
    """
    image = open_upright(data)
    if not image.has_transparency_data or image.mode.startswith("I"):
        return None
    alpha = Image.new("L", image.size)
    for part, place in parts_of(image):
        alpha.paste(part.convert("RGBA").getchannel("A"), place)
    return alpha if alpha.histogram()[255] < alpha.width * alpha.height else None
