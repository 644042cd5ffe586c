"""Verdicts of benchmarks/defaults.py."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A script of benchmarks/."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module(name)


@pytest.mark.parametrize(
    ("others", "verdict"),
    [
        ({"b": [1.0, 1.1, 0.9] * 2, "c": [2.0] * 6}, "within noise"),
        ({"b": [0.5, 0.6] * 3, "c": [0.9] * 6}, "slower"),
        ({"b": [1.5, 1.6] * 3, "c": [2.0] * 6}, "fastest"),
    ],
)
def test_a_default_is_slower_if_the_interval_excludes_one(others, verdict, monkeypatch) -> None:
    """It is compared with the fastest other value alone."""
    judge = load("defaults", monkeypatch).judge
    found = judge("a", {"a": [1.0] * 6, **others})
    assert (found["best_other"], found["verdict"]) == ("b", verdict)
    assert judge("a", {"a": [1.0] * 5, "b": [0.5] * 5})["verdict"] == "too few rounds"
