"""Image grid of samples: one row per prompt, with the prompt next to it."""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image, ImageDraw
from PIL.Image import Resampling

from zerotrain.data.fonts import line_height, wrap

SMALLEST_CELL, LARGEST_CELL = 64, 256
GAP, CONDITIONING_GAP = 4, 12
LABEL_WIDTH = 200
FONT_SIZE = 13
BACKGROUND, INK = "white", "black"


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
    width, height = cell_size(rows[0][0].size)
    columns = max(len(row) for row in rows)
    step, down = width + GAP, height + GAP
    given = conditioning or [()] * len(rows)
    first = max(len(images) for images in given)
    start = LABEL_WIDTH + GAP + (first * step + CONDITIONING_GAP if first else 0)
    grid = Image.new("RGB", (start + columns * step, len(rows) * down + GAP), BACKGROUND)
    draw = ImageDraw.Draw(grid)
    for number, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        top = GAP + number * down
        _label(draw, prompt, top, height)
        for left, images in ((LABEL_WIDTH + GAP, given[number]), (start, row)):
            for column, image in enumerate(images):
                resample = Resampling.NEAREST if width > image.width else Resampling.LANCZOS
                scaled = image.convert("RGB").resize((width, height), resample)
                grid.paste(scaled, (left + column * step, top))
    return grid


def cut_rows(grid: Image.Image, count: int) -> list[Image.Image]:
    """Return the rows of `count` prompts from a drawn grid, each as one image without the prompt.

    Conditioning images are part of the row.
    """
    step = (grid.height - GAP) // count
    return [
        grid.crop((LABEL_WIDTH + GAP, top, grid.width - GAP, top + step - GAP))
        for top in range(GAP, GAP + count * step, step)
    ]


def cell_size(size: tuple[int, int]) -> tuple[int, int]:
    """Return the size of a cell for images of this size; the enlargement factor is whole."""
    width, height = size
    if max(size) < SMALLEST_CELL:
        factor = -(-SMALLEST_CELL // max(size))
        return width * factor, height * factor
    scale = min(1.0, LARGEST_CELL / max(size))
    return max(1, round(width * scale)), max(1, round(height * scale))


def _label(draw: ImageDraw.ImageDraw, prompt: str, top: int, height: int) -> None:
    """Write a prompt into the left column, centred in its row."""
    step = line_height(FONT_SIZE)
    shown = prompt.strip() or "(empty prompt)"
    lines = wrap(shown, LABEL_WIDTH - 2 * GAP, FONT_SIZE, most=max(1, height // step))
    first = top + (height - len(lines) * step) / 2
    for place, line in enumerate(lines):
        line.draw(draw, 2 * GAP, first + place * step, INK)
