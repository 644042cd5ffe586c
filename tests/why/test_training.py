"""What a plan would do to a phase's steps."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.builders.runs import make_config

from zerotrain import artifact
from zerotrain.artifact.recipe import Difference
from zerotrain.graph.why import estimates
from zerotrain.graph.why.work import foresee_restoring, foresee_training

RATE = Difference("settings", "train.learning_rate", 0.001, 0.002, "a")
UNTRAINED = [
    Difference("settings", "until", "40 steps", "80 steps", "a"),
    Difference("settings", "train.save_every", 10, 20, "a"),
    Difference("settings", "train.gradient_accumulation_steps", 1, 2, "a"),
    Difference("settings", "validation.every", 10, 20, "a"),
]


def foresee(folder: Path, span, changes=(), other=False, **train):
    """Of a phase with these training values."""
    phase = make_config(train=train).phases[0]
    return foresee_training(phase, folder, span, changes, other)


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A phase with rolling checkpoints of steps 20 and 40, and the published one of step 40."""
    for step in (20, 40):
        with artifact.publish(tmp_path / f"progress/step-{step:08d}", "checkpoint") as draft:
            draft.content = {}
    with artifact.publish(tmp_path / "checkpoint", "checkpoint") as draft:
        (draft.folder / "checkpoint.json").write_text(json.dumps({"step": 40}))
        draft.content = {}
    return tmp_path


SET_ASIDE = "trains again from step 0 to 40; its steps up to 40 are set aside"
CASES = {
    "nothing changed": ((0, 40), [], False, {}, ("is kept: what it trains is the same", 0)),
    "a trained value": ((0, 40), [RATE], False, {}, (SET_ASIDE, 40)),
    "other data": ((0, 40), [], True, {}, (SET_ASIDE, 40)),
    "values that train nothing": (
        (0, 80), UNTRAINED, False, {}, ("continues from step 40 to 80", 40),
    ),
    "continue": (
        (0, 80), [RATE], False, {"on_change": "continue"}, ("continues from step 40 to 80", 40),
    ),
    "stop": (
        (0, 40), [RATE], False, {"on_change": "stop"}, ("is refused: train.on_change: stop", 0),
    ),
    "an earlier end": ((0, 20), [], False, {}, ("publishes its step 20, no step is trained", 0)),
    "an end between": ((0, 30), [], False, {}, ("continues from step 20 to 30", 10)),
    "an end before all": (
        (0, 10), [], False, {}, ("trains again from step 0 to 10: its steps are all after 10", 10),
    ),
    "an unknown end": (None, [], False, {}, ("trains to 1 steps (its 40 steps)", None)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_steps_are_foreseen(trained, case):
    """As the training decides at its start."""
    span, changes, other, train, (what, steps) = CASES[case]
    found = foresee(trained, span, changes, other, **train)
    assert (found.what, found.steps) == (what, steps)


def test_a_new_phase_trains_from_the_end_of_the_one_before(tmp_path):
    """Whatever changed before it had any step."""
    found = foresee(tmp_path, (40, 80), [RATE], True)
    assert (found.what, found.steps, found.restarts) == ("trains from step 40 to 80", 40, False)


def test_a_damaged_checkpoint_is_published_again_as_far_as_progress_goes(trained):
    """Refused where no rolling one is whole; without a published one, it is trained again."""

    def foreseen() -> tuple[str, int | None]:
        found = foresee_restoring(trained, (0, 40))
        return found.what, found.steps

    progress = trained / "progress"
    assert foreseen() == ("publishes its step 40 again, no step is trained", 0)
    (progress / "step-00000040/manifest.json").write_text("{}")
    assert foreseen() == ("continues from step 20 to 40", 20)
    (progress / "step-00000020/manifest.json").write_text("{}")
    refused = (f"is refused: {progress} holds no whole checkpoint either", 0)
    assert foreseen() == refused
    shutil.rmtree(progress)
    assert foreseen() == refused
    shutil.rmtree(trained / "checkpoint")
    assert foreseen() == ("trains again from its start", 40)


def test_seconds_of_a_step_are_those_of_the_phase_alone(tmp_path):
    """From the first to the last line of its own, without the start before the first."""
    lines = [
        {"phase": "before", "step": 10, "seconds": 900.0},
        {"phase": tmp_path.name, "step": 20, "seconds": 7.0},
        {"phase": tmp_path.name, "step": 40, "seconds": 17.0},
        {"phase": tmp_path.name, "step": 40, "val_loss": 1.0},
    ]
    (tmp_path / "progress").mkdir()
    log = tmp_path / "progress/metrics.jsonl"
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert estimates.seconds_per_step(tmp_path) == 0.5
    assert estimates.trained_seconds(tmp_path) == 17.0
    log.write_text('{"phase": "torn')
    assert estimates.seconds_per_step(tmp_path) is None
