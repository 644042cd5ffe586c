"""The table of `make bench`, and what compare.py names."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch):
    """Import a script of benchmarks/."""
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])

    def load(name: str) -> ModuleType:
        module = importlib.import_module(name)
        monkeypatch.delitem(sys.modules, name)
        return module

    return load


def test_a_figure_is_judged_by_its_target(load) -> None:
    """Met, not met, no target, not measured."""
    bench = load("bench")
    figures = (
        bench.Figure("a", "a", "a_interval", at_most=1.03),
        bench.Figure("b", "b", at_least=8),
        bench.Figure("c", "c"),
        bench.Figure("d", "d", at_least=0.95, at_most=1.05),
        bench.Figure("e", "e", at_most=1),
    )
    listed = [bench.Benchmark("one", ("one.py",), 1, figures)]
    found = {"one": {"a": 1.01, "a_interval": [0.99, 1.02], "b": 7.5, "c": 3, "d": 1.06}}
    assert list(bench.rows(listed, found)) == [
        ("a", "1.01 [0.99, 1.02]", "<= 1.03", "met"),
        ("b", "7.5", ">= 8", "not met"),
        ("c", "3", "", ""),
        ("d", "1.06", ">= 0.95, <= 1.05", "not met"),
        ("e", "", "<= 1", "not measured"),
    ]


def test_a_script_that_fails_is_an_error_with_its_last_lines(load, tmp_path: Path) -> None:
    """Neither a failure nor a hang ends the others, and neither is a figure."""
    bench = load("bench")
    script = tmp_path / "one.py"
    script.write_text("import sys; print('{\"a\": 1}'); sys.exit('it broke')")
    assert bench.measure(bench.Benchmark("one", (str(script),), 60, ()))["error"].endswith(
        "it broke"
    )
    # Processes of a training end their whole group once their parent is gone.
    orphan = "import os, time; time.sleep(1); os.killpg(0, 9)"
    start = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {orphan!r}])"
    script.write_text(f"{start}; time.sleep(60)")
    hung = bench.measure(bench.Benchmark("one", (str(script),), 0.5, ()))
    assert hung["error"] == "took longer than 0.5 s"
    script.write_text("print('{\"a\": 1}'); print('a warning')")
    unread = bench.measure(bench.Benchmark("one", (str(script),), 60, ()))
    assert unread["error"] == "the last line is no JSON: a warning"
    script.write_text("print('{\"a\": 1}')")
    assert bench.measure(bench.Benchmark("one", (str(script),), 60, ()))["a"] == 1


@pytest.mark.parametrize(
    ("target", "before", "after", "verdict"),
    [
        ({"at_most": 1.03}, 1.0, (1.05, [1.02, 1.08]), "worse"),
        ({"at_most": 1.03}, 1.0, (1.05, [0.99, 1.08]), None),
        ({"at_most": 1.03}, 1.0, (0.9, [0.88, 0.95]), "better"),
        ({"at_least": 8}, 20.0, (15.0, [14, 16]), "worse"),
        ({"at_least": 8}, 20.0, (15.0, None), "worse"),
        ({"at_least": 8}, 20.0, (19.0, None), None),
        ({}, 1.5, (1.75, [1.71, 2.09]), "worse"),
        ({"at_least": 0.95, "at_most": 1.05}, 1.04, (0.9, None), "worse"),
    ],
)
def test_a_figure_is_worse_if_its_interval_excludes_the_earlier_one(
    load, target, before, after, verdict
) -> None:
    """On the side that is away from the target; by 10 % where the file has no interval."""
    compare, bench = load("compare"), load("bench")
    value, interval = after
    figure = bench.Figure("a", "a", "a_interval", **target)
    listed = [bench.Benchmark("one", ("one.py",), 1, (figure,))]
    later = {"one": {"a": value, "a_interval": interval}}
    found = [moved for moved, _ in compare.changes(listed, {"one": {"a": before}}, later)]
    assert found == ([verdict] if verdict else [])


def test_the_readme_keeps_what_is_around_the_table(load, tmp_path: Path) -> None:
    """The table is written between its marks, with date and machine."""
    bench = load("bench")
    readme = tmp_path / "README.md"
    readme.write_text(f"above\n{bench.BEGIN}old\n{bench.END}below\n")
    machine = {"cores": 2, "processor": "a processor", "versions.torch": "2.13.0"}
    record = {"date": "2026-01-02T03:04Z", "machine": machine, "results": {"one": {"a": 1.0}}}
    listed = [bench.Benchmark("one", ("one.py",), 1, (bench.Figure("text", "a", at_most=2),))]
    bench.write_readme(listed, record, readme)
    assert readme.read_text() == (
        f"above\n{bench.BEGIN}2026-01-02, 2 cores of a processor, torch 2.13.0.\n\n"
        "| figure | measured | target | |\n|---|---|---|---|\n| text | 1 | <= 2 | met |\n"
        f"{bench.END}below\n"
    )


def test_the_readme_is_not_written_with_some_of_the_figures(load, monkeypatch, capsys) -> None:
    """The table would lose the others."""
    bench = load("bench")
    monkeypatch.setattr(bench, "measure", lambda benchmark: pytest.fail("it was measured"))
    monkeypatch.setattr(sys, "argv", ["bench.py", "--only", "watch", "--readme"])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    assert ended.value.code == 2
    assert "--readme writes the whole table: leave --only out" in capsys.readouterr().err
