"""`zerotrain verify resume`: what it trains, and what it says where two trainings differ."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tests.builders.runs import make_config

from zerotrain.errors import PipelineError
from zerotrain.graph import reruns, verify_resume
from zerotrain.graph.verify_resume import Ending

ENDING = Ending({"a (master)": "1", "b (master)": "2"}, {4: 0.5, 5: 0.25}, {"step": 5})


def test_equal_endings_are_exact():
    """Equal in every tensor, loss and position."""
    verdict = verify_resume._judge(ENDING, replace(ENDING))
    assert verdict.equal
    assert "EXACT: 2 tensors and the losses of 2 steps are equal in every bit" in verdict.lines[-1]


def test_the_first_tensor_and_step_that_differ_are_named():
    """Of several the first one in the model's order, with both losses."""
    other = replace(ENDING, tensors=ENDING.tensors | {"b (master)": "3"}, losses={4: 0.5, 5: 0.3})
    verdict = verify_resume._judge(ENDING, other)
    assert not verdict.equal
    said = "\n".join(verdict.lines)
    assert "first loss that differs: step 5, 0.25 and 0.3" in said
    assert "first tensor that differs: b (master); 1 of 2 do" in said


def test_another_position_is_not_exact():
    """A count or a loss scale that differs shows before any tensor does."""
    verdict = verify_resume._judge(ENDING, replace(ENDING, position={"step": 6}))
    assert not verdict.equal
    assert verdict.lines[-1] == "step: 5 and 6"


def test_a_phase_before_it_is_not_trained_unasked(monkeypatch, tmp_path):
    """What the phase continues from may take days: it is named, with the command that makes it."""
    (tmp_path / "Snakefile").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reruns, "count_jobs", lambda runs, targets: {"train_phase": 1})
    run = make_config(run="r")
    with pytest.raises(PipelineError, match="results/r/a/state, which is not trained") as caught:
        verify_resume._make(Path("c.yaml"), run, {"start": Path("results/r/a/state")})
    assert "snakemake --cores all" in caught.value.hint


@pytest.mark.soak
@pytest.mark.parametrize(
    ("preset", "changes"),
    [
        ("torch", {"gradient_accumulation_steps": 2, "use_ema": True}),
        ("zero2_offload", {"num_processes": 2, "mixed_precision": "bf16"}),
        ("zero3", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_kill_through_the_real_launcher_changes_no_bit(training, preset, changes, capsys):
    """The real stage with its lock, accelerate's launcher and kill -9 of all that it started."""
    training.phase("a", preset, 4, **changes)
    inputs = {
        "launch": training.folder / "a" / "launch",
        "base": training.base,
        "cache": training.cache,
    }
    place = training.folder / "scratch"
    place.mkdir()
    verdict = verify_resume._compare(place, inputs, steps=40)
    assert verdict.equal, "\n".join(verdict.lines)
    assert "resumed from step 40 to 80" in capsys.readouterr().err


@pytest.mark.slow
def test_a_training_that_fails_is_reported(training):
    """Its last lines are repeated, and its folder is kept."""
    training.phase("a", "torch", 4)
    cache = training.folder / "cache"
    shutil.copytree(training.cache, cache)
    next(cache.glob("latents-*.safetensors")).write_bytes(b"")
    inputs = {"launch": training.folder / "a" / "launch", "base": training.base, "cache": cache}
    place = training.folder / "scratch"
    place.mkdir()
    with pytest.raises(PipelineError, match=r"ended with code 2 .*\n.*latents-"):
        verify_resume._compare(place, inputs, steps=4)
