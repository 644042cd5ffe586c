"""The last two lines of `zerotrain why`: time and disk."""

from __future__ import annotations

from typing import Any

import pytest

from zerotrain.pipeline.why import outcomes, report
from zerotrain.pipeline.why.outcomes import Outcome
from zerotrain.pipeline.why.report import text


class Planned:
    """A plan with one cause, and the outcomes of its jobs: seconds and bytes of each.

    Attributes:
        jobs: Names of the stages.
        causes: The plan itself is its cause.
    """

    text = "1 caption changed: cat.png"

    def __init__(self, **found: tuple[float | None, int | None]) -> None:
        self.jobs = self.followers = [*found]
        self.causes = [self]
        self._found = {
            name: Outcome(name, "", *values, changes=True, forecast=name.startswith("train"))
            for name, values in found.items()
        }

    def __iter__(self) -> Any:
        return iter(self._found.values())

    def of(self, job: str) -> Outcome:
        """The outcome of a job."""
        return self._found[job]


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
    monkeypatch.setattr(outcomes, "job_name", str)
    monkeypatch.setattr(report, "_free", lambda: 9_000_000_000)
    found, expected = CASES[case]
    planned: Any = Planned(**found)
    lines = text(planned, planned).splitlines()
    assert lines[0] == Planned.text
    assert lines[-2:] == expected
