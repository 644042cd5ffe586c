"""docs/external-checkpoints.md: a row for each program of the benchmark, within its bound."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    """benchmarks/external_checkpoints.py, which finds its programs next to it."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    path = BENCHMARKS / "external_checkpoints.py"
    spec = importlib.util.spec_from_file_location("external_checkpoints", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "external_checkpoints", module)
    spec.loader.exec_module(module)
    return module


def test_table_has_every_program_within_the_bound(benchmark: Any) -> None:
    """Weights, moments and step of each came over bit by bit, and 5 steps later both trainings are
    within 1e-6; where a checkpoint has no moments the table says so."""
    from external_programs import all_programs

    rows = benchmark.rows_of(benchmark.PAGE.read_text())
    programs = all_programs()
    assert list(rows) == [program.name for program in programs]
    for program in programs:
        weights, moments, step, groups, *figures = rows[program.name]
        assert (weights, step) == ("yes", "yes"), program.name
        assert moments == ("none" if program.without_moments else "yes"), program.name
        assert (groups == "none") == program.without_moments, program.name
        assert len(figures) == 4
        assert all(float(figure) <= benchmark.BOUND for figure in figures), program.name
