"""Pictures of samples with texts: a contact sheet with captions, a grid with a row per prompt."""

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


SMALLEST_CELL, LARGEST_CELL = 64, 256
GRID_GAP, CONDITIONING_GAP = 4, 12
LABEL_WIDTH = 200
LABEL_FONT_SIZE = 13
BACKGROUND, LABEL_INK = "white", "black"


def draw_grid(
    prompts: Sequence[str],
    rows: Sequence[Sequence[Image.Image]],
    conditioning: Sequence[Sequence[Image.Image]] | None = None,
) -> Image.Image:
    """Draw rows of images next to their prompts.

    Images whose longer side is below 64 px are enlarged by a whole factor to at least 64 px, those
    above 256 px are reduced to it.

    Args:
        prompts: The text of each row.
        rows: The images of each prompt, all of one size.
        conditioning: Square conditioning images of each prompt, on the left of the row with a wider
            gap after them.
    """
    width, height = grid_cell_size(rows[0][0].size)
    columns = max(len(row) for row in rows)
    step, down = width + GRID_GAP, height + GRID_GAP
    given = conditioning or [()] * len(rows)
    first = max(len(images) for images in given)
    start = LABEL_WIDTH + GRID_GAP + (first * step + CONDITIONING_GAP if first else 0)
    grid = Image.new("RGB", (start + columns * step, len(rows) * down + GRID_GAP), BACKGROUND)
    draw = ImageDraw.Draw(grid)
    for number, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        top = GRID_GAP + number * down
        _label(draw, prompt, top, height)
        for left, images in ((LABEL_WIDTH + GRID_GAP, given[number]), (start, row)):
            for column, image in enumerate(images):
                resample = Resampling.NEAREST if width > image.width else Resampling.LANCZOS
                scaled = image.convert("RGB").resize((width, height), resample)
                grid.paste(scaled, (left + column * step, top))
    return grid


def cut_rows(grid: Image.Image, count: int) -> list[Image.Image]:
    """Return the rows of `count` prompts from a drawn grid, each as one image without the prompt.

    Conditioning images are part of the row.
    """
    step = (grid.height - GRID_GAP) // count
    return [
        grid.crop((LABEL_WIDTH + GRID_GAP, top, grid.width - GRID_GAP, top + step - GRID_GAP))
        for top in range(GRID_GAP, GRID_GAP + count * step, step)
    ]


def grid_cell_size(size: tuple[int, int]) -> tuple[int, int]:
    """Return the size of a cell for images of this size; the enlargement factor is whole."""
    width, height = size
    if max(size) < SMALLEST_CELL:
        factor = -(-SMALLEST_CELL // max(size))
        return width * factor, height * factor
    scale = min(1.0, LARGEST_CELL / max(size))
    return max(1, round(width * scale)), max(1, round(height * scale))


def _label(draw: ImageDraw.ImageDraw, prompt: str, top: int, height: int) -> None:
    """Write a prompt into the left column, centred in its row."""
    step = line_height(LABEL_FONT_SIZE)
    shown = prompt.strip() or "(empty prompt)"
    lines = wrap(shown, LABEL_WIDTH - 2 * GRID_GAP, LABEL_FONT_SIZE, most=max(1, height // step))
    first = top + (height - len(lines) * step) / 2
    for place, line in enumerate(lines):
        line.draw(draw, 2 * GRID_GAP, first + place * step, LABEL_INK)
