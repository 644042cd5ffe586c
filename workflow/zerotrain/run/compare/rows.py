"""The table of a comparison: a row for each metric and each value that differs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zerotrain.evaluation.results import LABELS, compare_metrics, format_metric
from zerotrain.run.compare.differences import Difference
from zerotrain.run.compare.facts import Facts
from zerotrain.run.report.figures import format_learning_rate

LOGGED = {
    "step": "step",
    "samples": "samples seen",
    "last_loss": "training loss, last logged",
    "last_val_loss": "validation loss, last",
    "lowest_val_loss": "validation loss, lowest",
    "last_val_loss_ema": "validation loss of the EMA, last",
    "lowest_val_loss_ema": "validation loss of the EMA, lowest",
}
"""Labels of what the log has."""
DIFFERS = "what differs"
NONE = "-"
LONGEST = 60
"""Letters of a value that are shown."""


@dataclass(frozen=True)
class Rows:
    """Rows under a title: a name, and a cell for each side."""

    title: str
    rows: Sequence[Sequence[str]]


def make_rows(sides: Sequence[Facts], differences: Sequence[Difference]) -> list[Rows]:
    """Return the table: what was logged, the metrics of the evaluations, what differs."""
    logged = [side.logged for side in sides]
    groups = [
        Rows(
            "log",
            [
                [label, *(_cell(name, one.get(name)) for one in logged)]
                for name, label in LOGGED.items()
                if any(name in one for one in logged)
            ],
        ),
        Rows("evaluation", _metrics(sides, learned=True)),
        Rows("time and memory", [_times(logged), *_metrics(sides, learned=False)]),
        Rows(DIFFERS, [[one.key, *map(_values, one.values)] for one in differences]),
    ]
    return [group for group in groups if group.rows]


def _times(logged: Sequence[Mapping[str, float]]) -> list[str]:
    """Return the row of training times, of which the metrics of an evaluation have the parts."""
    name = "train_seconds"
    return [LABELS[name], *(_cell(name, one.get(name)) for one in logged)]


def _metrics(sides: Sequence[Facts], *, learned: bool) -> list[list[str]]:
    rows = compare_metrics([side.metrics for side in sides], learned=learned)
    return [[row[0], *(cell or NONE for cell in row[1:])] for row in rows]


def _cell(name: str, value: Any) -> str:
    return NONE if value is None else format_metric(name, value)


def _values(values: Sequence[Any] | None) -> str:
    """Format the values of a side; those of several phases with arrows between them."""
    return NONE if values is None else " -> ".join(map(format_value, values))


def format_value(value: Any) -> str:
    """Format a value of the configuration on one line."""
    if isinstance(value, str):
        text = " ".join(value.split())
    elif isinstance(value, float):
        text = format_learning_rate(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        text = f"{value:,}"
    elif isinstance(value, Mapping):
        text = ", ".join(f"{key}: {format_value(inside)}" for key, inside in value.items()) or "{}"
    else:
        text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
