"""Memory in the report: a line for each training process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from zerotrain.run.report import figures
from zerotrain.run.report.costs import memory_panels
from zerotrain.run.report.figures import Missing, Panel, Picture
from zerotrain.run.view import RunView

GIB = 2**30
Drawn = list[tuple[int, list[str]]]
Shown = Callable[[list[dict[str, Any]]], tuple[list[Panel], list[str]]]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Drawn:
    """Number of lines and names in the legend of each figure that is drawn."""
    found: Drawn = []

    def render(alt: str, draw: Callable[[Any, figures.Palette], None]) -> Picture:
        axes = Figure().subplots()
        draw(axes, figures.LIGHT)
        legend = axes.get_legend()
        names = [text.get_text() for text in legend.get_texts()] if legend else []
        found.append((len(axes.lines), names))
        return Picture(alt, b"")

    monkeypatch.setattr(figures, "render", render)
    return found


def line(phase: str, step: int, host: list[float], device: list[float]) -> dict[str, Any]:
    """A line of the log of as many processes as there are values, in GiB."""
    found: dict[str, Any] = {"phase": phase, "step": step, "loss": 1.0}
    for kind, values in (("host", host), ("device", device)):
        counts = [int(value * GIB) for value in values]
        found[f"{kind}_bytes"] = counts[0]
        if len(counts) > 1:
            found[f"{kind}_bytes_by_rank"] = counts
    return found


@pytest.fixture
def shown(tmp_path: Path) -> Shown:
    """The panels of a log, and the sentences about what is missing."""

    def show(lines: list[dict[str, Any]]) -> tuple[list[Panel], list[str]]:
        progress, missing = tmp_path / "phase" / "progress", Missing()
        progress.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (progress / "metrics.jsonl").write_text(text, encoding="utf-8")
        view = RunView("r", folders=[tmp_path / "phase"])
        return list(memory_panels(view, missing)), missing.sentences

    return show


def test_every_process_has_a_line_in_the_phases_that_have_it(drawn: Drawn, shown: Shown) -> None:
    """One process, then three: the second and third have no line in the first phase."""
    lines = [
        line("one", 1, [1.0], [0.0]), line("one", 2, [1.5], [0.0]),
        line("many", 3, [1.0, 2.0, 3.0], [0.5] * 3), line("many", 4, [1.0, 2.5, 2.0], [0.25] * 3),
    ]  # fmt: skip
    (host, device), _ = shown(lines)
    # Rank 0 has a line in each phase; the dashed line is the switch.
    assert drawn == [(2 + 1 + 1 + 1, ["rank 0", "rank 1", "rank 2"])] * 2
    assert host.table is not None
    assert [list(row) for row in host.table.rows] == [
        ["rank 0", "1.50 GiB", "2", "1.00 GiB"],
        ["rank 1", "2.50 GiB", "4", "2.50 GiB"],
        ["rank 2", "3.00 GiB", "3", "2.00 GiB"],
    ]
    assert "Rank 2 has the most: 3.00 GiB, at step 3. Rank 0 has at most 1.50 GiB." in host.text
    assert device.picture is not None
    assert device.picture.alt == "Device memory of the 3 processes over the steps of all phases"


def test_one_process_needs_neither_names_nor_a_table(drawn: Drawn, shown: Shown) -> None:
    """And memory that is never used, as of a device without a GPU, has no panel."""
    [panel], _ = shown([line("one", 1, [1.0], [0.0]), line("one", 2, [1.25], [0.0])])
    assert drawn == [(1, [])]
    assert panel.table is None
    assert "The first process has at most 1.25 GiB, at step 2." in panel.text
    assert shown([{"phase": "one", "step": 1, "loss": 1.0}]) == ([], ["The log has no memory."])


def test_more_processes_than_colours_are_named_by_the_table_alone(
    drawn: Drawn, shown: Shown
) -> None:
    [panel], _ = shown([line("many", step, [1.0] * 8, [0.0] * 8) for step in (1, 2)])
    assert drawn == [(8, [])]
    assert panel.table is not None
    assert len(panel.table.rows) == 8
    assert "The lines of more than 7 processes are not named; the table lists them." in panel.text
