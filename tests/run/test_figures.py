"""The figures of a run's curves: equal logs give equal pictures, which show what was logged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from zerotrain.run.curves import Curves
from zerotrain.run.report.figures import (
    LIGHT,
    Chart,
    Curve,
    format_learning_rate,
    loss_chart,
    rate_chart,
    running_mean,
    write_curves,
)


def line(phase: str, step: int, rate: float) -> dict[str, Any]:
    """A line of the training log."""
    return {"phase": phase, "step": step, "loss": 1 / step, "learning_rate": rate}


FALLING = [line("plain", 10 * n, 1e-4 * (1 - n / 10)) for n in range(1, 11)]
CYCLED = [*FALLING, *(line("cycle", 100 + 10 * n, 1e-4) for n in range(1, 11))]


@pytest.mark.parametrize("lines", [CYCLED, FALLING[:1], []])
def test_the_picture_is_drawn_from_any_log(tmp_path: Path, lines: list[dict[str, Any]]) -> None:
    """Equal logs give equal bytes."""
    log = Curves(lines)
    for name in ("a.png", "b.png"):
        write_curves([loss_chart(log), rate_chart(log)], log.spans, tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    with Image.open(tmp_path / "a.png") as image:
        assert image.width > 600


def test_the_curve_is_that_of_the_log(tmp_path: Path) -> None:
    """A falling rate is a line from the upper left to the lower right."""
    log = Curves(FALLING)
    write_curves([rate_chart(log)], log.spans, tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as image:
        colour = tuple(bytes.fromhex(LIGHT.series[0][1:]))
        rows, columns = np.nonzero(np.all(np.asarray(image.convert("RGB")) == colour, axis=-1))
    assert np.corrcoef(columns, rows)[0, 1] > 0.99


def test_each_further_chart_has_a_panel_of_its_own(tmp_path: Path) -> None:
    log = Curves(CYCLED)
    more = Chart("beta1", [Curve("beta1", [(110.0, 0.9), (200.0, 0.8)])])
    write_curves([rate_chart(log)], log.spans, tmp_path / "one.png")
    write_curves([rate_chart(log), more], log.spans, tmp_path / "two.png")
    with Image.open(tmp_path / "one.png") as one, Image.open(tmp_path / "two.png") as two:
        assert two.height > 1.5 * one.height


def test_the_running_mean_starts_at_the_first_value() -> None:
    means = running_mean([2.0, 2.0, 0.0])
    assert means[:2] == pytest.approx([2.0, 2.0])
    assert means[2] == pytest.approx(2 - 2 / (1 + 0.6 + 0.36))


@pytest.mark.parametrize(
    ("number", "expected"),
    [(0, "0"), (8e-5, "8e-5"), (1e-4, "1e-4"), (1.25e-3, "1.25e-3"), (0.02, "0.02"), (0.9, "0.9")],
)
def test_rates_are_written_as_people_write_them(number: float, expected: str) -> None:
    assert format_learning_rate(number) == expected
