"""Colours become sRGB by the file's ICC profile, as a viewer shows them."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageCms
from tests.builders import colour_profiles

from zerotrain.config.data import DataConfig
from zerotrain.data.decode import UNUSED_PROFILE, decode, read_size
from zerotrain.stages.prepare_dataset import prepare_dataset

SWAPPED = colour_profiles.rgb((colour_profiles.SRGB[2], *colour_profiles.SRGB[:2]))
"""A screen whose red is sRGB's blue, whose green is red, and whose blue is green."""


def encoded(image: Image.Image, profile: bytes | None, form: str = "PNG", **rest: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, form, icc_profile=profile, **rest)
    return stream.getvalue()


def shown(image: Image.Image, profile: bytes | None, form: str = "PNG", **rest: object) -> tuple:
    """The first pixel after decoding."""
    found = decode(encoded(image, profile, form, **rest)).getpixel((0, 0))
    assert isinstance(found, tuple)
    return found


@pytest.mark.parametrize("form", ["PNG", "TIFF", "WEBP"])
def test_a_red_that_viewers_show_as_blue_is_blue(form: str) -> None:
    """In every format that keeps a profile; within rounding."""
    options = {"lossless": True} if form == "WEBP" else {}
    image = Image.new("RGB", (3, 2), (255, 0, 0))
    assert shown(image, SWAPPED, form, **options) == pytest.approx((0, 0, 255), abs=2)
    assert shown(image, None, form, **options) == (255, 0, 0)


def test_a_wide_gamut_is_converted_by_its_primaries() -> None:
    """Display P3 of the same curve: its matrix and sRGB's inverse, computed here."""
    colour = np.array([200, 120, 60])
    curve = lambda v: np.where(v <= 0.04045, v / 12.92, ((v + 0.055) / 1.055) ** 2.4)  # noqa: E731
    xyz = curve(colour / 255) @ np.array(colour_profiles.P3)
    linear = np.clip(xyz @ np.linalg.inv(np.array(colour_profiles.SRGB)), 0, 1)
    expected = np.where(linear <= 0.0031308, linear * 12.92, 1.055 * linear ** (1 / 2.4) - 0.055)
    image = Image.new("RGB", (1, 1), tuple(colour.tolist()))
    found = shown(image, colour_profiles.rgb(colour_profiles.P3))
    assert found == pytest.approx(tuple(255 * expected), abs=2)
    assert max(abs(np.subtract(found, colour))) > 5


def test_greys_follow_their_curve() -> None:
    """Of 8 and of 16 bits: linear 0.5 is 188 of 255."""
    linear = colour_profiles.grey(colour_profiles.gamma(1.0))
    assert shown(Image.new("L", (1, 1), 128), linear) == pytest.approx((188,) * 3, abs=2)
    deep = Image.fromarray(np.full((1, 1), 128 * 257, np.uint16))
    assert shown(deep, linear) == pytest.approx((188,) * 3, abs=2)


def test_inks_are_the_colours_of_their_press() -> None:
    """Lab of paper and ink: 100, 0, 0 is white, 50, 0, 0 a grey of 119."""
    press = colour_profiles.cmyk(paper=(255, 128, 128), inked=(128, 128, 128))
    for inks, value in (((0, 0, 0, 0), 255), ((255, 255, 255, 255), 119)):
        image = Image.new("CMYK", (8, 8), inks)
        assert shown(image, press, "TIFF") == pytest.approx((value,) * 3, abs=2)


def test_transparency_stays_under_a_profile() -> None:
    """Over white as before, with the colour of what is opaque converted."""
    layer = Image.new("RGBA", (2, 1), (255, 0, 0, 0))
    layer.putpixel((1, 0), (255, 0, 0, 255))
    found = decode(encoded(layer, SWAPPED))
    assert found.getpixel((0, 0)) == (255, 255, 255)
    assert found.getpixel((1, 0)) == pytest.approx((0, 0, 255), abs=2)
    palette = Image.new("P", (1, 1), 3)
    palette.putpalette([255, 0, 0] * 256)
    assert shown(palette, SWAPPED) == pytest.approx((0, 0, 255), abs=2)


def test_srgb_itself_changes_no_byte() -> None:
    """Tagged or not, the file's values: those of most images."""
    values = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    image = Image.fromarray(values)
    own = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    for profile in (None, own, colour_profiles.rgb(colour_profiles.SRGB)):
        assert np.array_equal(np.asarray(decode(encoded(image, profile))), values)


def test_images_of_several_parts_are_as_whole() -> None:
    """More rows than a part has."""
    values = np.random.default_rng(0).integers(0, 256, (600, 2, 3), dtype=np.uint8)
    whole = np.asarray(decode(encoded(Image.fromarray(values), SWAPPED)))
    rows = [np.asarray(decode(encoded(Image.fromarray(row[None]), SWAPPED))) for row in values]
    assert np.array_equal(whole, np.concatenate(rows))


@pytest.mark.parametrize(
    ("mode", "profile"), [("RGB", b"no profile"), ("RGB", SWAPPED[:300]), ("L", SWAPPED)]
)
def test_an_unusable_profile_leaves_the_values(mode: str, profile: bytes) -> None:
    """And the reason is known."""
    image = Image.new(mode, (1, 1), 77)
    found = decode(encoded(image, profile))
    assert found.getpixel((0, 0)) == image.convert("RGB").getpixel((0, 0))
    assert found.info[UNUSED_PROFILE]


def test_an_unusable_profile_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the stage that reads every image."""
    monkeypatch.chdir(tmp_path)
    images = tmp_path / "images"
    images.mkdir()
    for name, profile in (("a", None), ("b", b"no profile"), ("c", SWAPPED)):
        image = Image.new("RGB", (8, 8), (9, 9, ord(name)))
        (images / f"{name}.png").write_bytes(encoded(image, profile))
    data = DataConfig.model_validate(
        {"source": "folder", "images": "images", "caption_strategy": "instanceprompt",
         "instance_prompt": "a"}
    )  # fmt: skip
    prepare_dataset(data, tmp_path / "dataset")
    said = capsys.readouterr().err
    assert "1 images have a colour profile that cannot be used, such as b.png" in said


def png_with(kind: bytes, content: bytes) -> bytes:
    """A PNG of one red pixel with a chunk after its header."""
    plain = encoded(Image.new("RGB", (1, 1), (255, 0, 0)), None)
    chunk = struct.pack(">I", len(content)) + kind + content
    return plain[:33] + chunk + struct.pack(">I", zlib.crc32(kind + content)) + plain[33:]


@pytest.mark.parametrize(
    ("kind", "start"),
    [(b"zTXt", b"parameters\0\0"), (b"iTXt", b"workflow\0\1\0\0\0"), (b"iCCP", b"mine\0\0")],
)
def test_a_png_with_much_text_has_its_pixels(kind: bytes, start: bytes) -> None:
    """Programs that make images keep their settings there; Pillow refuses more than 1 MB."""
    data = png_with(kind, start + zlib.compress(bytes(2 * 2**20)))
    found = decode(data)
    assert found.getpixel((0, 0)) == (255, 0, 0)
    assert (UNUSED_PROFILE in found.info) == (kind == b"iCCP")
    assert read_size(data) == (1, 1)
