"""Trained parameters that the loss does not depend on are named, and refused where DDP would wait
for them."""

from __future__ import annotations

import pytest
from tests.training.test_resume import PRESETS

from zerotrain.checkpoint import Checkpoint
from zerotrain.position import MASTER

NAMED = "the loss does not depend on 2 of the trained parameters: forgotten.bias, forgotten.weight"
slow = pytest.mark.slow


@pytest.mark.parametrize("preset", ["torch", "zero2", pytest.param("zero3_offload", marks=slow)])
def test_unused_parameters_are_named(training, preset):
    """Once, at the first step of a start; the training goes on, and says how they change."""
    training.run("a", preset, 3, family="unused", gradient_accumulation_steps=2)
    said = training.output.read_text()
    assert said.count(f"{NAMED}; weight decay alone changes them") == 1
    assert "frozen_parameters" in said


def test_unused_parameters_are_none_of_an_ordinary_model(training):
    """Every preset's first step reaches every parameter of a U-Net, and of an adapter."""
    for preset in PRESETS:
        training.run(preset, preset, 1)
    assert "does not depend" not in training.output.read_text()


def test_unused_parameters_are_refused_under_ddp(training):
    """Instead of torch's traceback at the second step; by one process, in one sentence."""
    training.phase("a", "torch", 3, family="unused", num_processes=2)
    for process in training.start_ranks("a", 2):
        process.join(60)
        assert process.exitcode is not None
    said = training.output.read_text()
    assert said.count(f"{NAMED}; DDP would wait for their gradients") == 1
    assert "launch.find_unused_parameters: true" in said
    assert "Traceback" not in said


def test_find_unused_parameters_goes_on_under_ddp(training):
    """In silence, and with the weights of one process but for the order of sums."""
    changes = {"family": "unused", "find_unused_parameters": True, "max_grad_norm": 0.0}
    training.run("two", "torch", 3, num_processes=2, **changes)
    training.run("one", "torch", 3, **changes)
    assert "does not depend" not in training.output.read_text()
    two, one = (Checkpoint(training.progress(name) / "step-00000003") for name in ("two", "one"))
    for name in one.names:
        apart = (two.tensor(name, MASTER) - one.tensor(name, MASTER)).abs().max()
        assert apart <= 1e-5, name
