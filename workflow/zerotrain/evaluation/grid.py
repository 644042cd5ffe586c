"""A grid of samples: one row for each prompt, the prompt beside it."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

from PIL import Image, ImageDraw, ImageFont
from PIL.Image import Resampling

SMALLEST_CELL, LARGEST_CELL = 64, 256
GAP = 4
LABEL_WIDTH = 200
LETTERS_IN_LINE = 28
FONT_SIZE = 13
BACKGROUND, INK = "white", "black"


def draw_grid(prompts: Sequence[str], rows: Sequence[Sequence[Image.Image]]) -> Image.Image:
    """Draw rows of square images beside their prompts.

    Small images are enlarged pixel by pixel to at least 64 px, large ones reduced to 256 px.
    """
    font = ImageFont.load_default(FONT_SIZE)
    cell = cell_side(rows[0][0].width)
    columns = max(len(row) for row in rows)
    step = cell + GAP
    grid = Image.new(
        "RGB", (LABEL_WIDTH + columns * step + GAP, len(rows) * step + GAP), BACKGROUND
    )
    draw = ImageDraw.Draw(grid)
    for number, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        top = GAP + number * step
        lines = _lines(prompt, most=max(1, cell // (FONT_SIZE + 4)))
        draw.text((2 * GAP, top + cell // 2), lines, fill=INK, font=font, anchor="lm")
        for column, image in enumerate(row):
            resample = Resampling.NEAREST if cell > image.width else Resampling.LANCZOS
            scaled = image.convert("RGB").resize((cell, cell), resample)
            grid.paste(scaled, (LABEL_WIDTH + GAP + column * step, top))
    return grid


def cell_side(width: int) -> int:
    """Side of a cell for images of this width; enlarging is by a whole factor."""
    if width < SMALLEST_CELL:
        return width * -(-SMALLEST_CELL // width)
    return min(width, LARGEST_CELL)


def _lines(prompt: str, most: int) -> str:
    lines = wrap(prompt, LETTERS_IN_LINE) or ["(empty prompt)"]
    if len(lines) > most:
        lines = [*lines[: most - 1], lines[most - 1][: LETTERS_IN_LINE - 1] + "…"]
    return "\n".join(lines)
