"""The grid of samples."""

from __future__ import annotations

from pathlib import Path

import manimgx_fonts
import manimgx_fonts_cjk
import numpy as np
import pytest
from PIL import Image, ImageChops, ImageDraw, ImageFont

from zerotrain.data.fonts import ASCENT, line_height
from zerotrain.data.sheets import (
    CONDITIONING_GAP,
    GRID_GAP,
    LABEL_FONT_SIZE,
    LABEL_WIDTH,
    cut_rows,
    draw_grid,
    grid_cell_size,
)


def test_each_prompt_has_a_row_of_its_images():
    """Small images are enlarged whole pixels at a time, in their place."""
    colours = [["red", "green", "blue"], ["white", "black", "yellow"]]
    rows = [[Image.new("RGB", (32, 32), name) for name in row] for row in colours]
    grid = draw_grid(["one", "two"], rows)
    assert grid.size == (LABEL_WIDTH + 3 * 68 + GRID_GAP, 2 * 68 + GRID_GAP)
    for number, row in enumerate(rows):
        for column, image in enumerate(row):
            left, top = LABEL_WIDTH + GRID_GAP + 68 * column, GRID_GAP + 68 * number
            cell = grid.crop((left, top, left + 64, top + 64))
            assert cell.getcolors() == [(64 * 64, image.getpixel((0, 0)))]


def test_conditioning_images_are_on_the_left_of_their_row():
    """The samples follow after a wider gap; a row that is cut out has both."""
    given, made = (
        [[Image.new("RGB", (64, 64), name) for name in row] for row in colours]
        for colours in ([["red", "green"], ["blue", "white"]], [["black"], ["yellow"]])
    )
    grid = draw_grid(["one", "two"], made, given)
    start = LABEL_WIDTH + GRID_GAP + 2 * 68 + CONDITIONING_GAP
    assert grid.size == (start + 68, 2 * 68 + GRID_GAP)
    for number, row in enumerate(cut_rows(grid, 2)):
        lefts = [0, 68, start - LABEL_WIDTH - GRID_GAP]
        for left, image in zip(lefts, [*given[number], *made[number]], strict=True):
            cell = row.crop((left, 0, left + 64, 64))
            assert cell.getcolors() == [(64 * 64, image.getpixel((0, 0)))]


def test_every_prompt_is_written_next_to_its_row():
    """Also one that is too long for its line, and the empty one."""
    rows = [[Image.new("RGB", (32, 32))] for _ in range(3)]
    grid = draw_grid(["a house", "a very long prompt " * 20, ""], rows)
    for number in range(3):
        label = grid.crop((0, GRID_GAP + 68 * number, LABEL_WIDTH, 68 * (number + 1)))
        assert np.asarray(label.convert("L")).min() < 128


@pytest.mark.parametrize(
    ("prompt", "package", "file", "direction"),
    [
        ("a naïve “red” house", manimgx_fonts, "NotoSans[wght].ttf", "ltr"),
        ("Красный дом, ёлка", manimgx_fonts, "NotoSans[wght].ttf", "ltr"),
        ("一座红色的房子", manimgx_fonts_cjk, "NotoSansCJK-VF.otf.ttc", "ltr"),
        ("صورة منزل أحمر", manimgx_fonts, "NotoSansArabic[wght].ttf", "rtl"),
        ("ቀይ ቤት", manimgx_fonts, "NotoSansEthiopic[wght].ttf", "ltr"),
        ("😀🏠🎨", manimgx_fonts, "NotoEmoji[wght].ttf", "ltr"),
    ],
    ids=["Latin", "Cyrillic", "Chinese", "Arabic", "Amharic", "emoji"],
)
def test_prompts_of_every_script_are_legible(prompt, package, file, direction):
    """As a font of the script draws the whole text: joined, and in the order of reading."""
    chinese = 2 if file.endswith("ttc") else 0
    path = Path(package.__file__).with_name(file)
    font = ImageFont.truetype(path, LABEL_FONT_SIZE, chinese, layout_engine=ImageFont.Layout.RAQM)
    font.set_variation_by_axes([400])
    grid = draw_grid([prompt], [[Image.new("RGB", (64, 64))]])
    expected = Image.new("RGB", (LABEL_WIDTH, grid.height), "white")
    base = GRID_GAP + (64 - line_height(LABEL_FONT_SIZE)) / 2 + ASCENT * LABEL_FONT_SIZE
    ImageDraw.Draw(expected).text(
        (2 * GRID_GAP, base), prompt, "black", font, anchor="ls", direction=direction
    )
    label = grid.crop((0, 0, *expected.size))
    assert ImageChops.difference(label, expected).getbbox() is None
    box = font.getmask("\U0010fffd")
    assert all(bytes(font.getmask(one)) != bytes(box) for one in prompt if one != " ")


def test_cells_are_neither_tiny_nor_huge():
    sides = (8, 32, 48, 64, 200, 1024)
    expected = [64, 64, 96, 64, 200, 256]
    assert [grid_cell_size((side, side)) for side in sides] == [(side, side) for side in expected]


def test_a_cell_has_the_shape_of_its_image():
    """The longer side counts; a grid of wide images has low rows."""
    sizes = [(24, 8), (96, 48), (1216, 832)]
    assert [grid_cell_size(size) for size in sizes] == [(72, 24), (96, 48), (256, 175)]
    wide = [[Image.new("RGB", (96, 48), "red")] * 3] * 2
    grid = draw_grid(["a", "b"], wide)
    rows = cut_rows(grid, 2)
    assert [row.size for row in rows] == [(3 * 96 + 2 * GRID_GAP, 48)] * 2
    assert all(row.getpixel((95, 47)) == (255, 0, 0) for row in rows)
