"""Decoding: every kind of pixels becomes upright RGB, and every broken file says why."""

from __future__ import annotations

import io
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile

from zerotrain.data import decode as module
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


def test_transparent_images_of_several_parts_are_as_whole(monkeypatch):
    """Parts of whole rows, the last one smaller, give the pixels of Pillow's own composition."""
    draw = np.random.default_rng(0)
    layer = Image.fromarray(draw.integers(0, 256, (7, 5, 4), dtype=np.uint8))
    white = Image.new("RGBA", layer.size, (255, 255, 255, 255))
    whole = np.asarray(Image.alpha_composite(white, layer).convert("RGB"))
    for pixels in (1, 12, 10**6):
        monkeypatch.setattr(module, "PART_PIXELS", pixels)
        assert np.array_equal(np.asarray(decode(encoded(layer))), whole)


STORED: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    1: lambda upright: upright,
    2: np.fliplr,
    3: lambda upright: np.rot90(upright, 2),
    4: np.flipud,
    5: lambda upright: np.swapaxes(upright, 0, 1),
    6: np.rot90,
    7: lambda upright: np.swapaxes(np.rot90(upright, 2), 0, 1),
    8: lambda upright: np.rot90(upright, -1),
}
"""By value of EXIF's orientation, how a camera stores an upright picture."""


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "TIFF"])
def test_every_exif_orientation_gives_the_same_upright_pixels(form):
    """To the bit in formats without loss; in blocks of one colour within JPEG's rounding."""
    draw = np.random.default_rng(0)
    upright = np.kron(draw.integers(0, 256, (2, 3), dtype=np.uint8), np.ones((16, 16), np.uint8))
    upright = np.stack([upright] * 3, axis=2)
    options: dict[str, Any] = {"WEBP": {"lossless": True}, "JPEG": {"quality": 100}}
    for orientation, turn in STORED.items():
        exif = Image.Exif()
        exif[0x0112] = orientation
        stored = Image.fromarray(np.ascontiguousarray(turn(upright)))
        image = decode(encoded(stored, form, exif=exif, **options.get(form, {})))
        assert image.size == (48, 32)
        difference = np.asarray(image).astype(int) - upright
        assert np.abs(difference).max() <= (2 if form == "JPEG" else 0), orientation


def test_sixteen_bit_grey_keeps_its_shades():
    grey = Image.fromarray(np.array([[0, 32896, 65535]], dtype=np.uint16))
    image = decode(encoded(grey))
    assert [image.getpixel((x, 0)) for x in range(3)] == [(v, v, v) for v in (0, 128, 255)]


def test_sixteen_bits_become_eight_in_every_part(monkeypatch):
    """Each of the 65,536 greys is the nearest of 256."""
    values = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    for pixels in (1000, 10**6):
        monkeypatch.setattr(module, "PART_PIXELS", pixels)
        found = np.asarray(decode(encoded(Image.fromarray(values))))
        assert np.array_equal(found, np.stack([np.round(values / 257)] * 3, axis=2))


def png(values: np.ndarray) -> bytes:
    """A PNG of 16 bits a channel with two to four channels, which Pillow does not write."""
    channels = values.shape[2]
    kind = {2: 4, 3: 2, 4: 6}[channels]  # grey and alpha, RGB, RGBA
    head = struct.pack(">IIBBBBB", values.shape[1], values.shape[0], 16, kind, 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )


@pytest.mark.parametrize("channels", [2, 3, 4])
def test_sixteen_bit_colours_are_within_one_of_eight_bits(channels):
    """RGB and RGBA over white, grey with alpha over white; Pillow takes the higher byte."""
    values = np.random.default_rng(0).integers(0, 65536, (9, 11, channels), dtype=np.uint16)
    exact = values / 257
    if channels != 3:
        alpha = exact[:, :, -1:] / 255
        exact = exact[:, :, :-1] * alpha + 255 * (1 - alpha)
    found = np.asarray(decode(png(values))).astype(float)
    assert np.abs(found - exact).max() <= (1 if channels == 3 else 2)


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "YCbCr", "LAB"])
def test_other_modes_become_rgb_as_pillow_converts_them(mode):
    """A palette and grey to the bit, in colours that no conversion leaves equal."""
    draw = np.random.default_rng(0)
    picture = Image.fromarray(draw.integers(0, 256, (9, 7, 3), dtype=np.uint8))
    if mode == "LAB":
        stored = Image.frombytes("LAB", (9, 7), draw.bytes(9 * 7 * 3))
    else:
        stored = picture.quantize(9) if mode == "P" else picture.convert(mode)
    image = decode(encoded(stored, "TIFF"))
    assert image.mode == "RGB"
    assert np.array_equal(np.asarray(image), np.asarray(stored.convert("RGB")))


def test_inks_of_cmyk_are_their_colours():
    """Of a JPEG as print programs write it, whose values Adobe stores inverted."""
    inks = {(255, 0, 0, 0): (0, 255, 255), (0, 255, 255, 0): (255, 0, 0), (0, 0, 0, 255): (0, 0, 0)}
    for ink, colour in inks.items():
        image = decode(encoded(Image.new("CMYK", (8, 8), ink), "JPEG", quality=100))
        assert np.abs(np.asarray(image).astype(int) - colour).max() <= 2


@pytest.mark.parametrize("form", ["GIF", "PNG", "WEBP", "AVIF", "TIFF"])
def test_an_animation_is_its_first_frame(form):
    """GIF, APNG, WebP and AVIF; of a TIFF the first page."""
    frames = [Image.new("RGB", (16, 8), colour) for colour in ("red", "lime", "blue")]
    options: dict[str, Any] = {"WEBP": {"lossless": True}, "AVIF": {"quality": 100}}
    data = encoded(
        frames[0], form, save_all=True, append_images=frames[1:], **options.get(form, {})
    )
    with Image.open(io.BytesIO(data)) as opened:
        assert getattr(opened, "n_frames", 1) == 3
    assert np.abs(np.asarray(decode(data)).astype(int) - (255, 0, 0)).max() <= 3


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


FILES: dict[str, dict[str, Any]] = {
    "PNG": {}, "JPEG": {}, "JPEG progressive": {"progressive": True}, "WEBP": {},
    "WEBP lossless": {"lossless": True}, "GIF": {}, "TIFF": {},
    "TIFF lzw": {"compression": "tiff_lzw"}, "AVIF": {}, "BMP": {}, "JPEG2000": {}, "TGA": {},
}  # fmt: skip


@pytest.fixture(params=FILES)
def whole(request) -> bytes:
    """A file of each format, with a picture that does not compress to nothing."""
    draw = np.random.default_rng(0)
    blocks = draw.integers(0, 256, (8, 8, 3), dtype=np.uint8)
    picture = Image.fromarray(np.kron(blocks, np.ones((6, 8, 1), np.uint8)))
    return encoded(picture, request.param.split()[0], **FILES[request.param])


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_truncated_file_is_refused_wherever_it_ends(whole):
    """Or has all its pixels, if only what follows them is missing. No other error leaves."""
    pixels = np.asarray(decode(whole))
    refused = 0
    ends = [*range(0, len(whole), max(1, len(whole) // 40))]
    for end in ends:
        try:
            found = np.asarray(decode(whole[:end]))
        except BadImageError:
            refused += 1
        else:
            assert np.array_equal(found, pixels), end
    assert refused >= len(ends) - 2


MEASURE = """
import re, sys
from zerotrain.data.decode import BadImageError, decode
peak = lambda: 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
data, before, said = open(sys.argv[1], "rb").read(), peak(), ""
try:
    decode(data)
except BadImageError as error:
    said = error
print(peak() - before, said)
"""


@pytest.fixture
def growth(tmp_path: Path) -> Callable[[bytes], tuple[int, str]]:
    """Decode an image in a process of its own; returns by how many bytes it grows, and what the
    image is refused for."""

    def decoded(data: bytes) -> tuple[int, str]:
        (tmp_path / "image").write_bytes(data)
        command = [sys.executable, "-c", MEASURE, str(tmp_path / "image")]
        said = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=60
        ).stdout
        grown, _, reason = said.strip().partition(" ")
        return int(grown), reason

    return decoded


def test_pixels_take_few_bytes_of_memory_each(growth):
    """A 16-bit PNG of kilobytes, and a transparent one, take little more than their pixels: no
    eight bytes for each of several steps."""
    size = (4000, 3000)
    grey = Image.fromarray(np.full(size[::-1], 32896, np.uint16))
    for image in (grey, Image.new("RGBA", size)):
        data = encoded(image, compress_level=1)
        assert len(data) < 300_000
        grown, reason = growth(data)
        assert (grown < 12 * size[0] * size[1], reason) == (True, "")


SMALL = (1000, 750)
FLAT = Image.new("RGB", SMALL, "red")
CLEAR = Image.new("RGBA", SMALL)


@pytest.mark.parametrize(
    ("image", "form", "options", "each"),
    [
        (FLAT, "JPEG", {"progressive": True, "subsampling": 0}, 12),
        (FLAT, "WEBP", {"method": 0}, 17),
        (FLAT, "AVIF", {"speed": 10, "subsampling": "4:4:4"}, 12),
        (FLAT, "JPEG2000", {}, 25),
        (FLAT, "TIFF", {"compression": "tiff_lzw", "strip_size": 3 * 1000 * 750}, 12),
        (FLAT, "GIF", {}, 5),
        (FLAT, "PNG", {}, 4),
        (CLEAR, "PNG", {}, 8),
        (CLEAR, "WEBP", {"method": 0}, 17),
        (CLEAR, "JPEG2000", {}, 25),
        (Image.new("L", SMALL), "PNG", {}, 5),
        (Image.new("LA", SMALL), "PNG", {}, 8),
        (Image.new("CMYK", SMALL), "JPEG", {}, 8),
        (Image.new("I;16", SMALL), "PNG", {}, 5),
    ],
)
def test_each_kind_of_image_has_its_bytes_for_a_pixel(image, form, options, each, monkeypatch):
    """With a byte less than it needs, it is refused by its header."""
    data = encoded(image, form, **options)
    monkeypatch.setattr(module, "MOST_EXPANSION", 0)
    monkeypatch.setattr(module, "MOST_BYTES", each * 1000 * 750)
    assert decode(data).size == SMALL
    monkeypatch.setattr(module, "MOST_BYTES", each * 1000 * 750 - 1)
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda image: pytest.fail("decoded"))
    with pytest.raises(BadImageError, match="1000 x 750 pixels"):
        decode(data)


def test_a_turned_image_counts_twice(monkeypatch):
    """Its copy is made while the first one is there."""
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(FLAT, exif=exif)
    monkeypatch.setattr(module, "MOST_EXPANSION", 0)
    monkeypatch.setattr(module, "MOST_BYTES", 8 * 1000 * 750)
    assert decode(data).size == SMALL[::-1]
    monkeypatch.setattr(module, "MOST_BYTES", 8 * 1000 * 750 - 1)
    with pytest.raises(BadImageError, match="take 6,000,000 bytes of memory"):
        decode(data)


def test_a_large_file_may_hold_a_large_image(monkeypatch):
    """A photograph of more pixels than any file may hold takes up to 100 times its file."""
    monkeypatch.setattr(module, "MOST_BYTES", 10**6)
    with pytest.raises(BadImageError, match="and than 100 times its file"):
        decode(encoded(FLAT))
    assert decode(encoded(Image.effect_noise(SMALL, 90))).size == SMALL


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
