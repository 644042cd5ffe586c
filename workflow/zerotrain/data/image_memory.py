"""How much memory an image takes while it is decoded and converted, by its header."""

from __future__ import annotations

from PIL import Image

from zerotrain.data.source import BadImageError

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
