"""Decoding: every kind of pixels becomes upright RGB, and every broken file says why."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from zerotrain.data.decode import decode
from zerotrain.data.source import BadImageError


def encoded(image: Image.Image, form: str = "PNG", **options: object) -> bytes:
    """The bytes of an image file."""
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


def test_transparent_pixels_lie_over_white():
    layer = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    layer.putpixel((1, 0), (10, 20, 30, 255))
    image = decode(encoded(layer))
    assert image.mode == "RGB"
    assert [image.getpixel((x, 0)) for x in (0, 1)] == [(255, 255, 255), (10, 20, 30)]
    palette = Image.new("P", (1, 1), 3)
    palette.putpalette([0] * 768)
    assert decode(encoded(palette, transparency=3)).getpixel((0, 0)) == (255, 255, 255)
    assert decode(encoded(Image.new("LA", (1, 1), (9, 0)))).getpixel((0, 0)) == (255, 255, 255)


def test_exif_orientation_is_applied():
    image = Image.new("RGB", (4, 2), (0, 0, 0))
    image.putpixel((0, 0), (255, 0, 0))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned a quarter clockwise
    upright = decode(encoded(image, exif=exif))
    assert upright.size == (2, 4)
    assert upright.getpixel((1, 0)) == (255, 0, 0)


def test_sixteen_bit_grey_keeps_its_shades():
    grey = Image.fromarray(np.array([[0, 32896, 65535]], dtype=np.uint16))
    image = decode(encoded(grey))
    assert [image.getpixel((x, 0)) for x in range(3)] == [(v, v, v) for v in (0, 128, 255)]


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK"])
def test_other_modes_become_rgb(mode):
    image = decode(encoded(Image.new(mode, (3, 2)), "TIFF"))
    assert (image.mode, image.size) == ("RGB", (3, 2))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty file (0 bytes)"),
        (b"<html>not found</html>", "not an image that Pillow can read"),
        (
            encoded(Image.effect_noise((64, 64), 90))[:-2000],
            "unreadable image (image file is trunc",
        ),
        (
            encoded(Image.effect_noise((64, 64), 90), "JPEG")[:-900],
            "unreadable image (image file i",
        ),
        (
            encoded(Image.new("F", (2, 2)), "TIFF"),
            "floating-point pixels, whose range is not known",
        ),
        (encoded(Image.new("I", (1, 1), 70000), "TIFF"), "32-bit pixels, whose range is not known"),
    ],
)
def test_broken_files_say_why(data, reason):
    with pytest.raises(BadImageError) as caught:
        decode(data)
    assert str(caught.value).startswith(reason)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_decompression_bomb_is_refused_before_it_fills_memory(monkeypatch):
    data = encoded(Image.new("1", (40, 30)))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 700)
    assert decode(data).size == (40, 30)  # above Pillow's limit it would only warn
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500)
    with pytest.raises(
        BadImageError, match="more than 1,000 pixels, a possible decompression bomb"
    ):
        decode(data)
