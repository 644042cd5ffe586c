"""Decoding of an image file's bytes to sRGB pixels as a person sees them, in limited memory."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import TypeVar

from PIL import ExifTags, Image, ImageCms, ImageOps, UnidentifiedImageError

from zerotrain.data.source import BadImageError

T = TypeVar("T")
FORMATS = {
    "AVIF": "AVIF",
    "BMP": "BMP",
    "DIB": "BMP",
    "GIF": "GIF",
    "JPEG": "JPEG",
    "JPEG2000": "JPEG 2000",
    "PNG": "PNG",
    "PPM": "PPM",
    "PSD": "PSD",
    "QOI": "QOI",
    "TGA": "TGA",
    "TIFF": "TIFF",
    "WEBP": "WebP",
}
"""Pillow's name and the usual name of each supported format. Pillow supports more, including EPS,
which is a program for a PostScript interpreter."""
PREFIX_BYTES = 16
"""Number of bytes by which Pillow distinguishes formats."""
TURNED = range(2, 9)
"""EXIF's orientations other than upright."""
FIRST_TURNED = 5
"""EXIF's first orientation in which width and height are exchanged."""
UNUSED_PROFILE = "unused_profile"
"""Key of an image's info: why its colours were taken as sRGB though its file has a profile."""
PNG = b"\x89PNG\r\n\x1a\n"
COMPRESSED = (b"zTXt", b"iTXt", b"iCCP")
PART_PIXELS = 2**20
"""Number of pixels that are converted at a time where a conversion takes memory."""

# Pillow warns above this number of pixels and refuses twice as many. Large scans are harmless, and
# refused images are reported as bad samples, so the warning is redundant.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


def decode(data: bytes, background: str = "#ffffff") -> Image.Image:
    """Decode an image to RGB: upright by its EXIF orientation, over a colour where transparent.

    For an animation use the first frame. Scale 16-bit greys to 8 bits. Convert colours to sRGB by
    the file's ICC profile, as viewers do; without one they are taken as sRGB. If the profile cannot
    be used, the image's info has the reason as UNUSED_PROFILE.

    Raises:
        BadImageError: the bytes are not an image in one of FORMATS, are truncated, or would fill
            memory (image_memory).
    """
    if not data:
        raise BadImageError("empty file (0 bytes)")
    try:
        image = open_upright(data)
        profile, unused = image.info.get("icc_profile"), None
        if not profile and data.startswith(PNG) and b"iCCP" in data[: data.find(b"IDAT")]:
            unused = "it has more than 1 MB, or is damaged"
        # Each of the names for an image goes before the next image is made.
        if image.mode.startswith("I"):
            image = _eight_bits(image)
        if profile:
            try:
                image = convert_to_srgb(image, profile)
            except ProfileError as error:
                unused = str(error)
        if image.has_transparency_data:
            image = _over(image, background)
        elif image.mode != "RGB":
            image = image.convert("RGB")
        if unused is not None:
            image.info[UNUSED_PROFILE] = unused
        return image
    except (BadImageError, MemoryError):
        raise
    except UnidentifiedImageError as error:
        raise BadImageError(_name_other_format(data)) from error
    except Image.DecompressionBombError as error:
        limit = 2 * (Image.MAX_IMAGE_PIXELS or 0)
        raise BadImageError(f"more than {limit:,} pixels, a possible decompression bomb") from error
    except Exception as error:  # Pillow's plugins raise any error on broken files
        raise BadImageError(f"unreadable image ({error or type(error).__name__})") from error


def open_upright(data: bytes) -> Image.Image:
    """Decode an image to the pixels of its file, turned by its EXIF orientation.

    Raises:
        BadImageError: its pixels are floating-point numbers, or would fill memory.
    """
    image = _tolerating_text(_load, data)
    if image.getexif().get(ExifTags.Base.Orientation, 1) in TURNED:
        check_memory(image, data, turned=True)
        ImageOps.exif_transpose(image, in_place=True)
    return image


def _size(data: bytes) -> tuple[int, int]:
    with Image.open(io.BytesIO(data), formats=[*FORMATS]) as image:
        turned = image.getexif().get(ExifTags.Base.Orientation, 1) >= FIRST_TURNED
        return image.size[::-1] if turned else image.size


def _load(data: bytes) -> Image.Image:
    image: Image.Image = Image.open(io.BytesIO(data), formats=[*FORMATS])
    if image.mode == "F":
        raise BadImageError("floating-point pixels, whose range is not known")
    check_memory(image, data)
    image.load()
    return image


def _tolerating_text(read: Callable[[bytes], T], data: bytes) -> T:
    """Read an image; of a PNG with more compressed text than Pillow takes, 1 MB, its pixels."""
    try:
        return read(data)
    except ValueError:
        if not data.startswith(PNG):
            raise
        return read(_without_text(data))


def _without_text(data: bytes) -> bytes:
    """Return a PNG without its compressed chunks that are no pixels: texts and a profile."""
    found, place = [data[: len(PNG)]], len(PNG)
    while place + 8 <= len(data):
        end = place + 12 + int.from_bytes(data[place : place + 4], "big")
        if data[place + 4 : place + 8] not in COMPRESSED:
            found.append(data[place:end])
        place = end
    return b"".join(found)


def read_size(data: bytes) -> tuple[int, int]:
    """Return the upright width and height of an image from its header.

    Raises:
        BadImageError: there is no readable header.
    """
    try:
        return _tolerating_text(_size, data)
    except MemoryError:
        raise
    except Exception as error:  # Pillow's plugins raise any error on broken files
        raise BadImageError(f"unreadable image ({error or type(error).__name__})") from error


def _name_other_format(data: bytes) -> str:
    """Name the unsupported format of a file by its first bytes."""
    Image.init()
    for name, (_, accepts) in Image.OPEN.items():
        if name not in FORMATS and accepts and accepts(data[:PREFIX_BYTES]) is True:
            *others, last = dict.fromkeys(FORMATS.values())
            listed = f"{', '.join(others)} and {last}"
            return f"of the format {name}, which is not opened; images are {listed}"
    return "not an image that Pillow can read"


def parts_of(image: Image.Image) -> Iterator[tuple[Image.Image, tuple[int, int]]]:
    """Cut an image into parts of whole rows, each with its place."""
    rows = max(1, PART_PIXELS // image.width)
    for top in range(0, image.height, rows):
        yield image.crop((0, top, image.width, min(top + rows, image.height))), (0, top)


def _over(image: Image.Image, background: str) -> Image.Image:
    found = Image.new("RGB", image.size)
    for part, place in parts_of(image):
        layer = part.convert("RGBA")
        ground = Image.new("RGBA", layer.size, background)
        found.paste(Image.alpha_composite(ground, layer).convert("RGB"), place)
    return found


def _eight_bits(image: Image.Image) -> Image.Image:
    """Convert 16-bit grey to 8 bits; Pillow's conversion makes everything above 255 white."""
    import numpy as np

    found = Image.new("L", image.size)
    for part, place in parts_of(image):
        values = np.asarray(part).astype(np.int64)
        if values.min() < 0 or values.max() > 65535:
            raise BadImageError("32-bit pixels, whose range is not known")
        found.paste(Image.fromarray(np.round(values / 257).astype(np.uint8)), place)
    return found


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


MOST_BYTES = 900_000_000
"""Memory that any image may take: 5 bytes for each of the most pixels that Pillow opens."""
MOST_EXPANSION = 100
"""How many times its file a larger image may take. Photographs take 10 to 50 times theirs, and an
image of one colour a million times."""
STORED = {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16L": 2, "I;16B": 2, "I;16N": 2}
"""Bytes of a pixel in Pillow's memory, by mode; those of all other modes are 4."""
DECODERS = {"AVIF": 8, "JPEG2000": 21, "QOI": 4, "TIFF": 8, "WEBP": 13}
"""Bytes of a pixel that a format's library holds next to Pillow's, as measured. A strip of a TIFF
may be all of it, in 16 bits for each of 4 channels."""
COEFFICIENTS = 8
"""The same of a JPEG in several scans, which are collected: 2 bytes for each of 4 channels."""
SCAN = b"\xff\xda"
"""A scan of a JPEG begins with it."""


def check_memory(image: Image.Image, data: bytes, *, turned: bool = False) -> None:
    """Check that decoding an image to RGB takes a reasonable amount of memory.

    Args:
        image: An image whose header has been read.
        data: Its file's bytes.
        turned: Whether it is to be turned, by a copy.

    Raises:
        BadImageError: it takes more than MOST_BYTES, and more than MOST_EXPANSION times its file.
    """
    pixels = image.width * image.height
    needed = pixels * _bytes_of_a_pixel(image, data, turned)
    if needed > max(MOST_BYTES, MOST_EXPANSION * len(data)):
        raise BadImageError(
            f"its {image.width} x {image.height} pixels would take {needed:,} bytes of memory, "
            f"more than {MOST_BYTES:,} and than {MOST_EXPANSION} times its file, a possible "
            "decompression bomb"
        )


def _bytes_of_a_pixel(image: Image.Image, data: bytes, turned: bool) -> int:
    stored = STORED.get(image.mode, 4)
    decoder = DECODERS.get(image.format or "", 0)
    if image.format in ("JPEG", "MPO") and data.count(SCAN) > 1:
        decoder = COEFFICIENTS
    profile = image.info.get("icc_profile")
    if image.mode == "RGB" and not image.has_transparency_data and not profile:
        converted = stored
    else:
        # 16 bits become 8 before there is an RGB image.
        converted = 4 + (1 if image.mode.startswith("I") else stored)
        if profile and image.mode != "CMYK":
            converted += 4  # the copy whose colours are converted
    return max(stored + decoder, converted, 2 * stored if turned else 0)


MODES = {"RGB ": "RGB", "GRAY": "L", "CMYK": "CMYK"}
"""Pillow's mode of the pixels of a profile's colour space."""
PART_ROWS = 256
GRID = 9
"""Values of each channel by which a profile is compared with sRGB."""
ROUNDING = 1
"""Largest difference in 8 bits that a profile of sRGB itself makes."""


class ProfileError(Exception):
    """A profile that cannot be used; the text gives the reason, as part of a sentence."""


def convert_to_srgb(image: Image.Image, profile: bytes) -> Image.Image:
    """Convert pixels to sRGB, by relative colorimetric intent; keep their opacity.

    Args:
        image: In 8 bits for each channel.
        profile: The ICC profile of its file (https://www.color.org/specification/ICC.1-2022-05.pdf).

    Returns:
        The same image if the profile is that of sRGB; otherwise RGB, or RGBA with transparency.

    Raises:
        ProfileError: the profile is damaged, or of another kind of pixels.
    """
    mode = _mode_of(profile)
    transparent = image.has_transparency_data
    plain = image.convert("RGBA") if transparent or image.mode == "P" else image
    if mode == "L":
        plain, fits = image.convert("LA" if transparent else "L"), image.mode in ("1", "L", "LA")
    else:
        fits = plain.mode.startswith(mode)
    if not fits:
        raise ProfileError(f"of {mode} pixels, and the image's are {image.mode}")
    transform = _transform(profile, mode)
    if transform is None:
        return image
    found = Image.new("RGBA" if transparent else "RGB", image.size)
    for top in range(0, image.height, PART_ROWS):
        part = plain.crop((0, top, image.width, min(top + PART_ROWS, image.height)))
        colours = ImageCms.applyTransform(_without_alpha(part, mode), transform)
        assert colours is not None
        if transparent:
            colours.putalpha(part.getchannel("A"))
        found.paste(colours, (0, top))
    return found


def _without_alpha(part: Image.Image, mode: str) -> Image.Image:
    return part if part.mode == mode else part.convert(mode)


@lru_cache(maxsize=16)
def _mode_of(profile: bytes) -> str:
    space = _opened(profile).profile.xcolor_space
    if space not in MODES:
        raise ProfileError(f"of the colour space {space.strip()}")
    return MODES[space]


@lru_cache(maxsize=16)
def _transform(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """Return the transform to sRGB; None if it changes nothing but by rounding."""
    try:
        found = ImageCms.buildTransform(
            _opened(profile),
            ImageCms.createProfile("sRGB"),
            mode,
            "RGB",
            ImageCms.Intent.RELATIVE_COLORIMETRIC,
        )
    except ImageCms.PyCMSError as error:
        raise ProfileError(f"damaged ({error})") from error
    if mode == "CMYK":
        return found
    steps = [round(255 * step / (GRID - 1)) for step in range(GRID)]
    values = (
        bytes(range(256))
        if mode == "L"
        else bytes(value for r in steps for g in steps for b in steps for value in (r, g, b))
    )
    shown = Image.frombytes(mode, (len(values) // len(mode), 1), values)
    converted = ImageCms.applyTransform(shown, found)
    assert converted is not None
    pairs = zip(converted.tobytes(), shown.convert("RGB").tobytes(), strict=True)
    return found if any(abs(one - other) > ROUNDING for one, other in pairs) else None


def _opened(profile: bytes) -> ImageCms.ImageCmsProfile:
    try:
        return ImageCms.ImageCmsProfile(io.BytesIO(profile))
    except (OSError, ValueError, ImageCms.PyCMSError) as error:
        raise ProfileError("damaged") from error
