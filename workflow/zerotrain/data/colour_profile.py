"""Conversion of an image's pixels to sRGB by the ICC profile in its file."""

from __future__ import annotations

import io
from functools import lru_cache

from PIL import Image, ImageCms

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
