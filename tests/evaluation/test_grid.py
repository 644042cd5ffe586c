"""The grid of samples."""

from __future__ import annotations

import numpy as np
from PIL import Image

from zerotrain.evaluation.grid import GAP, LABEL_WIDTH, cell_side, draw_grid


def test_each_prompt_has_a_row_of_its_images():
    """Small images are enlarged whole pixels at a time, in their place."""
    colours = [["red", "green", "blue"], ["white", "black", "yellow"]]
    rows = [[Image.new("RGB", (32, 32), name) for name in row] for row in colours]
    grid = draw_grid(["one", "two"], rows)
    assert grid.size == (LABEL_WIDTH + 3 * 68 + GAP, 2 * 68 + GAP)
    for number, row in enumerate(rows):
        for column, image in enumerate(row):
            left, top = LABEL_WIDTH + GAP + 68 * column, GAP + 68 * number
            cell = grid.crop((left, top, left + 64, top + 64))
            assert cell.getcolors() == [(64 * 64, image.getpixel((0, 0)))]


def test_every_prompt_is_written_beside_its_row():
    """Also one that is too long for its line, and the empty one."""
    rows = [[Image.new("RGB", (32, 32))] for _ in range(3)]
    grid = draw_grid(["a house", "a very long prompt " * 20, ""], rows)
    for number in range(3):
        label = grid.crop((0, GAP + 68 * number, LABEL_WIDTH, 68 * (number + 1)))
        assert np.asarray(label.convert("L")).min() < 128


def test_cells_are_neither_tiny_nor_huge():
    assert [cell_side(width) for width in (8, 32, 48, 64, 200, 1024)] == [64, 64, 96, 64, 200, 256]
