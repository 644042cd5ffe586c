"""A schedule that moves the first beta trains the same under every engine, whole or in parts."""

from __future__ import annotations

from typing import Any

import pytest
from tests.training.matrix import deviation

from zerotrain.launch.schedules import momentum

MIDDLE, END = 5, 10
ARGUMENTS = {
    "cycle_min_lr": 1e-4, "decay_lr_rate": 0.0, "cycle_first_step_size": 4,
    "cycle_second_step_size": 4, "cycle_first_stair_count": 0, "cycle_second_stair_count": 0,
    "decay_step_size": 0, "cycle_momentum": True, "cycle_min_mom": 0.5, "cycle_max_mom": 0.9,
    "decay_mom_rate": 0.0,
}  # fmt: skip
CYCLE: dict[str, Any] = {
    "lr_scheduler": "OneCycle", "lr_scheduler_args": ARGUMENTS, "lr_warmup_steps": 0,
}  # fmt: skip
OTHERS = {"torch": 0.0, "zero2": 0.0, "zero2_offload": 1e-6, "zero3": 1e-6}
"""Presets with the bound of their switch."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, inputs: Any, server: Any) -> Any:
    """A run of plain PyTorch through the cycle, saved in its middle."""
    from tests.training.conftest import Training

    found = Training(tmp_path_factory.mktemp("cycle"), inputs, server)
    found.run("whole", "torch", END, save_every=MIDDLE, keep=9, **CYCLE)
    found.export_state("whole", MIDDLE)
    return found


def test_a_saved_group_says_the_beta_of_the_step_to_come(whole):
    """As it says its rate; the log has those of the step that was made. The beta is 0.9 at the ends
    of the cycle and 0.5 at its peak."""
    [group] = whole.checkpoint("whole", MIDDLE).position.param_groups
    assert group["lr"] == pytest.approx(1e-4 + 9e-4 * 3 / 4)
    assert group["betas"] == pytest.approx([0.9 - 0.4 * 3 / 4, 0.99])
    logged = [line["beta1"] for line in whole.log("whole")]
    assert logged == pytest.approx([0.5, 0.8, 0.7, 0.6, 0.5, 0.6, 0.7, 0.8, 0.9, 0.9])


def test_the_beta_that_is_logged_is_used(whole):
    """Without it, the same learning rates train to other weights."""
    still = {**CYCLE, "lr_scheduler_args": {**ARGUMENTS, "cycle_momentum": False}}
    losses = whole.run("still", "torch", END, **still)
    rates = [line["learning_rate"] for line in whole.log("still")]
    assert rates == [line["learning_rate"] for line in whole.log("whole")]
    assert deviation(losses, whole.losses("whole")) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("preset", OTHERS)
def test_a_switch_in_the_middle_of_a_cycle_keeps_the_losses(whole, preset):
    """Rate and beta continue from the step, so the rest is that of the uninterrupted run."""
    state = whole.folder / f"whole-{MIDDLE}-state"
    losses = whole.run(f"to {preset}", preset, END, state=state, **CYCLE)
    assert deviation(losses, whole.losses("whole")) <= OTHERS[preset]


@pytest.mark.slow
def test_a_resume_in_the_middle_of_a_cycle_gives_the_same_bits(training):
    """CPU offload's optimizer keeps powers of its betas, which a resume has to make again."""
    training.assert_resumes("zero2_offload", MIDDLE, END, **CYCLE)


def test_no_other_schedule_moves_the_beta(training):
    phase = training.phase("a", "torch", 3)
    assert [momentum(phase.train, step, 10) for step in range(3)] == [None] * 3
