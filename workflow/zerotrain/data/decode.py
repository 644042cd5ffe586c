"""Decoding of an image file's bytes to RGB pixels as a person sees them."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator

from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from zerotrain.data.image_memory import check_memory
from zerotrain.data.source import BadImageError

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
PART_PIXELS = 2**20
"""Number of pixels that are converted at a time where a conversion takes memory."""

# Pillow warns above this number of pixels and refuses twice as many. Large scans are harmless, and
# refused images are reported as bad samples, so the warning is redundant.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


def decode(data: bytes, background: str = "#ffffff") -> Image.Image:
    """Decode an image to RGB: upright by its EXIF orientation, over a colour where transparent.

    For an animation use the first frame. Scale 16-bit greys to 8 bits.

    Raises:
        BadImageError: the bytes are not an image in one of FORMATS, are truncated, or would fill
            memory (image_memory).
    """
    if not data:
        raise BadImageError("empty file (0 bytes)")
    try:
        image = open_upright(data)
        # Each of the names for an image goes before the next image is made.
        if image.mode.startswith("I"):
            image = _eight_bits(image)
        if image.has_transparency_data:
            return _over(image, background)
        return image if image.mode == "RGB" else image.convert("RGB")
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
    image: Image.Image = Image.open(io.BytesIO(data), formats=[*FORMATS])
    if image.mode == "F":
        raise BadImageError("floating-point pixels, whose range is not known")
    check_memory(image, data)
    image.load()
    if image.getexif().get(ExifTags.Base.Orientation, 1) in TURNED:
        check_memory(image, data, turned=True)
        ImageOps.exif_transpose(image, in_place=True)
    return image


def read_size(data: bytes) -> tuple[int, int]:
    """Return the upright width and height of an image from its header.

    Raises:
        BadImageError: there is no readable header.
    """
    try:
        with Image.open(io.BytesIO(data), formats=[*FORMATS]) as image:
            turned = image.getexif().get(ExifTags.Base.Orientation, 1) >= FIRST_TURNED
            return image.size[::-1] if turned else image.size
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
