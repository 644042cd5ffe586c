"""What a person reads while a training runs."""

from __future__ import annotations

import time

from zerotrain.machine.output import format_figure
from zerotrain.training.reporting.display import (
    Display,
    format_duration,
    format_rate,
)


def test_lines_of_a_pipe_have_pace_and_time_left(monkeypatch, capsys) -> None:
    """One at the start, then one every 10 s; the first, slow step is no part of the pace; after
    some steps the end is foretold once."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    display = Display("a", 100, 1100)
    for step in range(101, 1101):
        now[0] += 60.0 if step == 101 else 0.5
        display.step(step, 0.25, 1e-4)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "a: step 101 of 1100, loss 0.2500, lr 1.00e-04"
    assert said[1].startswith("a: 989 steps to go at 2.00 steps/s take about 8:14: until ")
    assert said[2] == ("a: step 121 of 1100, loss 0.2500, lr 1.00e-04, 2.00 steps/s, 8:09 left")
    assert said[-1] == "a: step 1100 of 1100, loss 0.2500, lr 1.00e-04, 2.00 steps/s, done"
    assert sum("take about" in line for line in said) == 1


def test_a_short_training_has_no_forecast(monkeypatch, capsys) -> None:
    """Its lines are enough."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    display = Display("a", 0, 40)
    for step in range(1, 41):
        now[0] += 1.0
        display.step(step, 0.25, 1e-4)
    assert "take about" not in capsys.readouterr().err


def test_a_training_of_one_step_has_its_line(capsys) -> None:
    """And no pace, which one step does not tell."""
    Display("a", 9, 10).step(10, 0.25, 1e-4)
    assert capsys.readouterr().err == "a: step 10 of 10, loss 0.2500, lr 1.00e-04\n"


def test_times_and_paces_as_people_read_them() -> None:
    """Hours where there are some, seconds a step where steps are slow."""
    assert [format_duration(7), format_duration(187), format_duration(7509)] == [
        "0:07",
        "3:07",
        "2:05:09",
    ]
    assert [format_rate(2.5), format_rate(0.25)] == ["2.50 steps/s", "4.00 s/step"]


def test_figures_as_people_read_them() -> None:
    """Large ones in whole numbers with commas, small ones with four digits, extremes as powers."""
    figures = [37_700, 37_700.4, 12, 0.053121, 3.1e-05, 2e12, float("nan")]
    assert [format_figure(one) for one in figures] == [
        "37,700", "37,700", "12", "0.05312", "3.1e-05", "2e+12", "nan",
    ]  # fmt: skip
