"""The contact sheet: every picture in its place, none larger than its cell."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from zerotrain.data.sheets import GAP, MOST, SIDE, Picture, cell_size, draw_sheet, reduce


def picture(colour: str, size: tuple[int, int], file: str = "a.png", caption: str = "") -> Picture:
    return Picture(file, caption, reduce(Image.new("RGB", size, colour)))


@pytest.mark.parametrize(
    ("size", "reduced"),
    [
        ((3200, 1600), (160, 80)), ((10, 5000), (1, 160)), ((160, 160), (160, 160)),
        ((100, 150), (100, 150)), ((30, 20), (150, 100)), ((1, 1), (160, 160)),
    ],
)  # fmt: skip
def test_pictures_keep_their_shape(size: tuple[int, int], reduced: tuple[int, int]) -> None:
    """Large ones are reduced to the side; tiny ones are enlarged by a whole factor."""
    assert reduce(Image.new("RGB", size)).size == reduced


def test_each_picture_has_its_cell() -> None:
    """In rows, in the middle of its square."""
    colours = ["red", "lime", "blue", "black", "yellow"]
    sizes = [(400, 200), (200, 400), (50, 50), (160, 160), (1000, 10)]
    sheet = draw_sheet([picture(*one) for one in zip(colours, sizes, strict=True)])
    across, down = cell_size()
    assert sheet.size == (3 * across + GAP, 2 * down + GAP)
    for number, colour in enumerate(colours):
        left, top = GAP + number % 3 * across, GAP + number // 3 * down
        centre = sheet.getpixel((left + SIDE // 2, top + SIDE // 2))
        assert centre == Image.new("RGB", (1, 1), colour).getpixel((0, 0))


def test_a_full_sheet_has_a_bounded_size() -> None:
    """Whatever the size of the images: the pictures are small before it is drawn."""
    sheet = draw_sheet([picture("red", (10, 10))] * MOST)
    assert sheet.width * sheet.height < 6e6


@pytest.mark.parametrize("caption", ["a cat", "写真" * 500, "صورة " * 20_000])
def test_name_and_caption_are_below_the_picture(caption: str) -> None:
    """Nothing is drawn into the gap on the right or below, however long they are."""
    sheet = draw_sheet([picture("red", (160, 160), f"{'folder/' * 20}0001.png", caption)])
    pixels = np.asarray(sheet.convert("L"))
    below = pixels[GAP + SIDE : -GAP]
    assert below[:24].min() < 150  # the name
    assert below[24:].min() < 100  # the caption
    assert (pixels[:, -GAP:] == 255).all()
    assert (pixels[-GAP:] == 255).all()


def test_the_end_of_a_long_name_is_shown() -> None:
    """Files of one folder differ there."""
    names = [f"{folder}{'x' * 40}/{file}.png" for folder in "ab" for file in ("0001", "0002")]
    sheets = [draw_sheet([picture("red", (9, 9), name)]) for name in names]
    assert sheets[0] == sheets[2] != sheets[1]
