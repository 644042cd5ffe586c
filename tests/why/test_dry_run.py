"""The first lines of a dry run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from zerotrain.graph.currency import refresh
from zerotrain.graph.why import FORCED, causes, first_lines
from zerotrain.graph.why.causes import Cause, Causes


def dag_of(run, *, forced: str = "", edited: str = "") -> Any:
    """Snakemake's graph, of a run in which what runs is what runs after an edit, and `forced`; the
    rule `edited` was edited."""
    every = [*run.artifacts().planned.values()]
    runs = [*run.running(), forced]
    jobs = {
        one.name: SimpleNamespace(rule=one.rule, output=[str(path) for path in one.outputs])
        for one in every
    }
    return SimpleNamespace(
        jobs=jobs.values(),
        needrun_jobs=lambda: [job for name, job in jobs.items() if name in runs],
        reason=lambda job: SimpleNamespace(
            forced=job is jobs.get(forced), code_changed=job.rule == edited
        ),
    )


def lines_of(run, **given: str) -> list[str]:
    """What a dry run begins with."""
    return first_lines(dag_of(run, **given), refresh(run.artifacts().planned.values()))


def test_a_dry_run_names_the_causes(run):
    """What was found of artifacts, what the user asked for, and what the rules say."""
    run.config["phases"][1]["learning_rate"] = 0.002
    value = "why: train.learning_rate 0.001 -> 0.002 (phase offload)"
    assert lines_of(run) == [value]
    assert lines_of(run, forced="build_base tiny", edited="evaluate") == [
        *(value, f"why: {FORCED}", "why: evaluate: its rule was edited")
    ]


def test_a_dry_run_of_nothing_made_is_one_line(unmade):
    """As many stages as the graph has."""
    assert lines_of(unmade) == ["why: nothing is made yet"]


def test_a_dry_run_shows_at_most_nine_lines(run, monkeypatch):
    """Eight causes, and how many there are besides."""
    dag = dag_of(run)
    for number, last in ((8, "why: cause 7"), (10, "why: 2 more; `zerotrain why` names them")):
        every = [Cause("value", f"cause {place}") for place in range(number)]
        monkeypatch.setattr(
            causes, "find_causes", lambda *found, every=every, **given: Causes(every, {})
        )
        lines = first_lines(dag, [])
        assert lines[:8] == [f"why: cause {place}" for place in range(8)]
        assert (len(lines), lines[-1]) == (min(number, 9), last)


def test_a_dry_run_of_many_samples_names_files(run, monkeypatch):
    """It does not compare the samples."""
    monkeypatch.setattr("zerotrain.graph.why.samples.QUICK_SAMPLES", 2)
    Path("photos/cat.txt").write_text("a cat asleep", encoding="utf-8")
    assert lines_of(run) == ["why: changed: photos/cat.txt"]
    assert [*run.sentences()] == ["1 caption changed: cat.png"]
