"""Memory in the report: a line for each training process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from tests.builders.phases import make_phase

from zerotrain.evaluation.history import RunHistory
from zerotrain.evaluation.report import figures
from zerotrain.evaluation.report.facts import PhaseFacts, RunFacts
from zerotrain.evaluation.report.memory import memory_panels
from zerotrain.evaluation.report.parts import Missing, Panel, Picture

GIB = 2**30
Drawn = list[tuple[int, list[str]]]


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


def shown(lines: list[dict[str, Any]], phases: dict[str, int] | None = None) -> list[Panel]:
    """The panels of a log; `phases` have a launch of as many processes."""
    facts = [PhaseFacts(Path(name), {}, None, make_phase(num_processes=number), None, None)
             for name, number in (phases or {}).items()]  # fmt: skip
    return list(memory_panels(RunFacts("r", facts, [], RunHistory(lines, {})), Missing()))


def test_every_process_has_a_line_in_the_phases_that_have_it(drawn: Drawn) -> None:
    """One process, then three: the second and third have no line in the first phase."""
    lines = [
        line("one", 1, [1.0], [0.0]), line("one", 2, [1.5], [0.0]),
        line("many", 3, [1.0, 2.0, 3.0], [0.5] * 3), line("many", 4, [1.0, 2.5, 2.0], [0.25] * 3),
    ]  # fmt: skip
    host, device = shown(lines)
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


def test_one_process_needs_neither_names_nor_a_table(drawn: Drawn) -> None:
    """And memory that is never used, as of a device without a GPU, has no panel."""
    [panel] = shown([line("one", 1, [1.0], [0.0]), line("one", 2, [1.25], [0.0])])
    assert drawn == [(1, [])]
    assert panel.table is None
    assert "The first process has at most 1.25 GiB, at step 2." in panel.text
    missing = Missing()
    facts = RunFacts("r", [], [], RunHistory([{"phase": "one", "step": 1, "loss": 1.0}], {}))
    assert list(memory_panels(facts, missing)) == []
    assert missing.sentences == ["The log has no memory."]


def test_more_processes_than_colours_are_named_by_the_table_alone(drawn: Drawn) -> None:
    [panel] = shown([line("many", step, [1.0] * 8, [0.0] * 8) for step in (1, 2)])
    assert drawn == [(8, [])]
    assert panel.table is not None
    assert len(panel.table.rows) == 8
    assert "The lines of more than 7 processes are not named; the table lists them." in panel.text
