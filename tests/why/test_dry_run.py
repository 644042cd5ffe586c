"""The first lines of a dry run."""

from __future__ import annotations

from types import SimpleNamespace

from zerotrain.pipeline.why import causes, first_lines
from zerotrain.pipeline.why.causes import Cause, Plan


def test_a_dry_run_shows_at_most_nine_lines(monkeypatch):
    """Eight causes, and how many there are besides."""
    for number, last in ((8, "why: cause 7"), (10, "why: 2 more; `zerotrain why` names them")):
        every = [Cause("value", f"cause {place}") for place in range(number)]
        monkeypatch.setattr(
            causes, "find_causes", lambda dag, reasons, every=every: Plan([], every, {}, {})
        )
        lines = first_lines(None, {})
        assert lines[:8] == [f"why: cause {place}" for place in range(8)]
        assert (len(lines), lines[-1]) == (min(number, 9), last)


def test_a_dry_run_of_many_samples_takes_the_reason_that_it_has(monkeypatch):
    """It does not compare the samples, nor look for changed files once more."""
    job = SimpleNamespace(
        rule=SimpleNamespace(name="prepare_dataset"), output=["results/data/d/manifest.json"]
    )
    changed = SimpleNamespace(updated_input=["digest.json"], input_changed=False)
    dag = SimpleNamespace(reason=lambda job: changed)
    plan = SimpleNamespace(config_of=lambda job: SimpleNamespace(data=None), samples={}, values={})
    monkeypatch.setattr(causes, "compare_samples", lambda data, folder, quick: None)
    key = id(job)

    class Reasons:
        def __getitem__(self, asked):
            assert id(asked) == key
            return "changed: photos/cat.txt"

    assert [*causes._inputs(job, dag, plan, Reasons())] == [("file", "changed: photos/cat.txt")]
