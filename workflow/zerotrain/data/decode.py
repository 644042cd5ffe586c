"""Decoding of an image file's bytes to RGB pixels as a person sees them."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator
from typing import TypeVar

from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from zerotrain.data.colour_profile import ProfileError, convert_to_srgb
from zerotrain.data.image_memory import check_memory
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
