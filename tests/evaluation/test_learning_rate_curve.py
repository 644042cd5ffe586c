"""The learning rate of a run as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from zerotrain.evaluation.curves import draw_learning_rate, format_learning_rate


def line(phase: str, step: int, rate: float, **more: float) -> dict[str, Any]:
    """A line of the training log."""
    return {"phase": phase, "step": step, "learning_rate": rate, **more}


FALLING = [line("plain", 10 * n, 1e-4 * (1 - n / 10)) for n in range(1, 11)]
CYCLED = [*FALLING, *(line("cycle", 100 + 10 * n, 1e-4, beta1=0.9) for n in range(1, 11))]


@pytest.mark.parametrize("log", [CYCLED, FALLING, FALLING[:1], []])
def test_the_picture_is_drawn_from_any_log(tmp_path: Path, log: list[dict[str, Any]]) -> None:
    """Equal logs give equal bytes."""
    draw_learning_rate(log, tmp_path / "a.png")
    draw_learning_rate(log, tmp_path / "b.png")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    with Image.open(tmp_path / "a.png") as image:
        assert image.width > 600


def test_the_curve_is_that_of_the_log(tmp_path: Path) -> None:
    """A falling rate is a line from the upper left to the lower right."""
    draw_learning_rate(FALLING, tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as image:
        blue = np.all(np.asarray(image.convert("RGB")) == (0x1F, 0x4E, 0x8C), axis=-1)
    rows, columns = np.nonzero(blue)
    assert np.corrcoef(columns, rows)[0, 1] > 0.99


def test_a_beta_that_moves_has_a_panel_of_its_own(tmp_path: Path) -> None:
    draw_learning_rate(FALLING, tmp_path / "one.png")
    draw_learning_rate(CYCLED, tmp_path / "two.png")
    with Image.open(tmp_path / "one.png") as one, Image.open(tmp_path / "two.png") as two:
        assert two.height > 1.5 * one.height


@pytest.mark.parametrize(
    ("number", "expected"),
    [(0, "0"), (8e-5, "8e-5"), (1e-4, "1e-4"), (1.25e-3, "1.25e-3"), (0.02, "0.02"), (0.9, "0.9")],
)
def test_rates_are_written_as_people_write_them(number: float, expected: str) -> None:
    assert format_learning_rate(number) == expected
