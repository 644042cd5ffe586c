"""What follows from the measures of a phase: its best step, and an early end."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from zerotrain.training.reporting.validation_history import (
    ValidationHistory,
    best_step,
    finished_step,
    read_history,
    write_best,
    write_finished,
)


def history(values: list[float], began: int = 0) -> ValidationHistory:
    """A baseline of 0, lower than anything, and a value for each step after it."""
    measured = [
        {"step": began + n, "val_loss": v, "max_samples": 64} for n, v in enumerate([0.0, *values])
    ]
    return ValidationHistory(began, measured)


def settings(patience: int | None = None, threshold: float = 0.0) -> dict[str, Any]:
    return {
        "max_samples": 64,
        "metric_for_best_model": "val_loss",
        "early_stopping_patience": patience,
        "early_stopping_threshold": threshold,
    }


def test_best_is_the_lowest_and_the_first_of_equal_ones():
    """The baseline is none, nor is what is no number."""
    assert history([3, 1, 2, 1]).best(settings()) == {
        "step": 2, "metric": "val_loss", "value": 1,
    }  # fmt: skip
    assert history([math.nan, 4]).best(settings())["step"] == 2
    assert history([]).best(settings()) is None
    assert history([math.nan]).best(settings()) is None


@pytest.mark.parametrize(
    ("values", "patience", "threshold", "ends_at"),
    [
        ([3, 2, 1], 1, 0.0, None),
        ([3, 3], 1, 0.0, 2),
        ([3, 2, 2.5, 1, 1.5, 1.5], 2, 0.0, 6),
        ([3, 2.9, 2.8], 2, 0.5, 3),
        ([3, 2.4, 1.8], 2, 0.5, None),
        ([3, math.nan, math.nan], 2, 0.0, 3),
        ([3, 3, 3, 3], None, 0.0, None),
    ],
)
def test_patience_counts_validations_in_a_row_that_are_no_better(
    values, patience, threshold, ends_at
):
    """It ends at that validation and at none before."""
    rule = settings(patience, threshold)
    ended = [n for n in range(len(values) + 1) if history(values[:n]).end_reason(rule) is not None]
    assert ended[:1] == ([] if ends_at is None else [ends_at])


def test_means_over_other_samples_are_not_compared():
    """With another max_samples neither the best nor the patience knows the earlier values; with
    the former one they do again."""
    found = ValidationHistory(0)
    fewer = {**settings(2), "max_samples": 8}
    for step, value in ((1, 1.0), (2, 1.5), (3, 1.5)):
        found.note(step, {"val_loss": value}, fewer)
    found.note(4, {"val_loss": 3.0}, settings(2))
    assert found.best(settings(2))["step"] == 4
    assert found.end_reason(settings(2)) is None
    assert found.best(fewer)["step"] == 1
    assert found.end_reason(fewer) is not None


def test_what_is_no_number_is_null_in_json(tmp_path):
    """The file is JSON for every reader, and what is read back gives the same verdicts."""
    found = ValidationHistory(0)
    for step, value in enumerate((2.0, math.inf, math.nan), 1):
        found.note(step, {"val_loss": value}, settings())
    (tmp_path / "records").mkdir()
    found.write(tmp_path / "records")
    text = (tmp_path / "records" / "validation.json").read_text()

    def refuse(word: str) -> None:
        raise ValueError(word)

    lines = json.loads(text, parse_constant=refuse)["measured"]
    assert [line["val_loss"] for line in lines] == [2.0, None, None]
    again = read_history(tmp_path)
    assert again == found
    assert again.best(settings())["value"] == 2.0
    assert again.end_reason(settings(2)) is not None
    assert again.end_reason(settings(3)) is None


def test_a_sentence_says_why():
    """With the count and the best value."""
    assert history([3, 2, 2.5, 2.5]).end_reason(settings(2)) == (
        "val_loss was no better in 2 validations in a row (best 2)"
    )


def test_an_early_end_counts_under_its_own_settings_alone(tmp_path):
    """And as long as the phase is not to end before it."""
    assert finished_step(tmp_path, settings(2), 100) is None
    write_finished(tmp_path, 40, "reason", settings(2))
    assert finished_step(tmp_path, settings(2), 100) == 40
    assert finished_step(tmp_path, settings(2), 39) is None
    assert finished_step(tmp_path, settings(3), 100) is None
    assert finished_step(tmp_path, None, 100) is None


def test_a_best_step_that_is_none_is_forgotten(tmp_path):
    """A start from an earlier checkpoint may know no best any more."""
    assert best_step(tmp_path) is None
    write_best(tmp_path, {"step": 7, "metric": "val_loss", "value": 1.0})
    assert best_step(tmp_path) == 7
    write_best(tmp_path, None)
    assert best_step(tmp_path) is None
