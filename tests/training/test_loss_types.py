"""A phase trains the loss that it names, under every engine, and measures the same as ever."""

from __future__ import annotations

import pytest
from tests.training.matrix import deviation
from tests.training.measures import SETTINGS, measured, validations, weights

from zerotrain.config.training import TrainConfig

STEPS = 4


@pytest.mark.slow
def test_a_huber_loss_is_trained_alike_by_both_engines(training):
    """To the bit, as with l2; the validation measures squares, and says so."""
    huber = TrainConfig(loss_type="huber", snr_gamma=5.0).objective("sdxl")
    losses = training.run("h", "torch", STEPS, objective=huber, validation=SETTINGS)
    assert training.run("z", "zero2", STEPS, objective=huber) == losses
    assert training.hashes("z", STEPS) == training.hashes("h", STEPS)
    squares = TrainConfig(snr_gamma=5.0).objective("sdxl")
    assert deviation(training.run("l2", "torch", STEPS, objective=squares), losses) > 0.1
    said = training.output.read_text()
    assert "h: val_loss is the mean squared error (l2); huber is trained" in said
    assert "z: val_loss" not in said
    last = validations(training, "h")[-1]
    here = measured(weights(training, "sdxl", "h", STEPS), "sdxl", training)
    assert last["val_loss"] == pytest.approx(here, rel=1e-6)  # other threads round otherwise
