"""The last two lines of `zerotrain why`: time and disk."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from zerotrain.graph.currency import Currency
from zerotrain.graph.why import report
from zerotrain.graph.why.causes import Cause, Causes
from zerotrain.graph.why.outcomes import Outcome
from zerotrain.graph.why.report import text

CAUSE = "1 caption changed: cat.png"


class Found:
    """A plan with one cause, and the outcomes of its stages: seconds and bytes of each.

    Attributes:
        running: What runs.
    """

    def __init__(self, **found: tuple[float | None, int | None]) -> None:
        names: list[Any] = [SimpleNamespace(name=name) for name in found]
        self.running = [Currency(name) for name in names]
        self._found = [
            Outcome(one, "", *values, changes=True, forecast=one.planned.name.startswith("train"))
            for one, values in zip(self.running, found.values(), strict=True)
        ]

    def __iter__(self) -> Any:
        return iter(self._found)

    def of(self, one: Currency) -> Outcome:
        """The outcome of a stage."""
        return self._found[self.running.index(one)]

    def following(self, first: Any) -> Any:
        """All of them run for the cause."""
        return self.running


CASES: dict[str, tuple[dict[str, tuple[float | None, int | None]], list[str]]] = {
    "all known": (
        {"cache": (60.2, 40_000_000), "evaluate": (7.0, 2_500_000)},
        ["2 stages would run in about 1:07, as earlier ones took",
         "on disk: about 42.5 MB; 9.0 GB are free"],
    ),
    "a forecast": (
        {"train": (3600.0, 7_000_000_000)},
        ["1 stage would run in about 1:00:00, as earlier ones took or are forecast",
         "on disk: about 7.0 GB; 9.0 GB are free"],
    ),
    "some unknown": (
        {"cache": (9.0, 200_000), "evaluate": (None, None), "export": (None, None)},
        ["3 stages would run in about 0:09, as earlier ones took, and 2 stages of unknown time",
         "on disk: about 0.2 MB and what evaluate, export write, of unknown size; "
         "9.0 GB are free"],
    ),
    "nothing known": (
        {"cache": (None, None)},
        ["1 stage would run in an unknown time: no earlier stage tells it",
         "on disk: what cache writes, of unknown size; 9.0 GB are free"],
    ),
    "little": (
        {"report": (0.2, 99_999)},
        ["1 stage would run in about 0:00, as earlier ones took",
         "on disk: less than 0.1 MB; 9.0 GB are free"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_totals_are_sums_and_name_what_is_unknown(case, monkeypatch):
    """Each second and byte that is known counts once; what is free is next to it."""
    monkeypatch.setattr(report, "_free", lambda: 9_000_000_000)
    values, expected = CASES[case]
    found: Any = Found(**values)
    lines = text(found, Causes([Cause("samples", CAUSE)], {}), found).splitlines()
    assert lines[0] == CAUSE
    assert lines[-2:] == expected
