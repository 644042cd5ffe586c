"""A contact sheet: small pictures of samples with their file names and captions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING

from PIL import Image, ImageDraw
from PIL.Image import Resampling

from zerotrain.data.fonts import line_height, wrap

if TYPE_CHECKING:
    from zerotrain.data.dataset import Sample
    from zerotrain.data.source import Source

MOST = 96
"""Samples on a sheet. Its memory is bounded by them, whatever the number and size of images."""
SIDE = 160
"""Longer side of a small picture, in pixels."""
GAP = 12
FONT_SIZE = 12
NAME_LINES, CAPTION_LINES = 1, 3
NAME_LETTERS = 26
"""Letters of a file name that fit into a line."""
PAPER, INK, SOFT, FRAME = "white", "#1c1f23", "#5d6673", "#e4e7eb"
MOST_COLUMNS = 8


@dataclass(frozen=True)
class Picture:
    """A sample on the sheet."""

    file: str
    caption: str
    image: Image.Image
    """At most SIDE pixels wide and high."""


def read_pictures(samples: Sequence[Sample], source: Source) -> list[Picture]:
    """Read samples of a source one by one.

    Raises:
        PipelineError: an image is missing, unreadable or another one than its sample's.
    """
    return [
        Picture(
            sample.file,
            sample.caption,
            reduce(source.image_of(sample.file, sample.image_sha256)),
        )
        for sample in samples
    ]


def reduce(image: Image.Image) -> Image.Image:
    """Reduce an image to SIDE pixels, keeping its shape; enlarge a tiny one by a whole factor."""
    width, height = image.size
    if max(width, height) * 2 <= SIDE:
        factor = SIDE // max(width, height)
        return image.resize((width * factor, height * factor), Resampling.NEAREST)
    scale = min(1.0, SIDE / max(width, height))
    return image.resize(
        (max(1, round(width * scale)), max(1, round(height * scale))), Resampling.LANCZOS
    )


def draw_sheet(pictures: Sequence[Picture]) -> Image.Image:
    """Draw at least one picture into a grid, each above its file name and caption."""
    columns = min(MOST_COLUMNS, max(1, round(sqrt(1.5 * len(pictures)))))
    rows = -(-len(pictures) // columns)
    across, down = cell_size()
    size = (columns * across + GAP, rows * down + GAP)
    sheet = Image.new("RGB", size, PAPER)
    draw = ImageDraw.Draw(sheet)
    for number, picture in enumerate(pictures):
        left, top = GAP + number % columns * across, GAP + number // columns * down
        _draw_picture(sheet, draw, picture, left, top)
    return sheet


def cell_size() -> tuple[int, int]:
    """Return the width and height that a picture takes on a sheet, with the gap after it."""
    lines = NAME_LINES + CAPTION_LINES
    return SIDE + GAP, SIDE + GAP // 2 + lines * line_height(FONT_SIZE) + GAP


def _draw_picture(
    sheet: Image.Image, draw: ImageDraw.ImageDraw, picture: Picture, left: int, top: int
) -> None:
    draw.rectangle((left, top, left + SIDE - 1, top + SIDE - 1), outline=FRAME)
    width, height = picture.image.size
    sheet.paste(picture.image, (left + (SIDE - width) // 2, top + (SIDE - height) // 2))
    below = top + SIDE + GAP // 2
    lines = [
        *((line, SOFT) for line in wrap(_end(picture.file), SIDE, FONT_SIZE, NAME_LINES)),
        *((line, INK) for line in wrap(picture.caption, SIDE, FONT_SIZE, CAPTION_LINES)),
    ]
    for place, (line, ink) in enumerate(lines):
        line.draw(draw, left, below + place * line_height(FONT_SIZE), ink)


def _end(file: str) -> str:
    """Shorten a long file name from its start: names of one folder differ at the end."""
    return file if len(file) <= NAME_LETTERS else f"…{file[1 - NAME_LETTERS :]}"
