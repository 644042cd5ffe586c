"""Validation while training: the same numbers as an evaluation, and no trained number changed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.conftest import SEED, Training, trained_model
from tests.training.inputs import text_inputs

from zerotrain.cache import Cache, TokenCache, read_cache
from zerotrain.checkpoint import Checkpoint
from zerotrain.evaluation.holdout_loss import HeldOutImages, HeldOutText, holdout_loss
from zerotrain.families import load_family
from zerotrain.position import EMA
from zerotrain.trained import choose_trained, trained_parameters

SETTINGS: dict[str, Any] = {
    "eval_steps": 2, "eval_on_start": True, "max_samples": 64, "batch_size": 8,
    "metric_for_best_model": "val_loss", "load_best_model_at_end": False,
    "early_stopping_patience": None, "early_stopping_threshold": 0.0,
}  # fmt: skip


def validations(training: Training, name: str) -> list[dict[str, Any]]:
    """What the log says of validations."""
    return [line for line in training.log(name) if "val_loss" in line]


def held_out_loss(training: Training, family: str, step: int, name: str = "p") -> float:
    """What an evaluation finds of the weights of a checkpoint."""
    checkpoint = training.progress(name) / f"step-{step:08d}"
    model = trained_model(family, training.base, checkpoint)
    objective = load_family(family).objective(training.base)
    cache = read_cache(training.cache)
    held_out: Any = (
        HeldOutImages(cache, SEED) if isinstance(cache, Cache) else HeldOutText(cache, 256)
    )
    return holdout_loss(model, objective, held_out, torch.device("cpu"), 8)


@pytest.mark.parametrize("preset", ["torch", "zero1", "zero2_offload", "zero3", "zero3_offload"])
def test_validation_finds_what_an_evaluation_finds_and_changes_no_bit(training, preset):
    """val_loss in training equals that of the saved weights to the bit, at the start, within and at
    the end; the trained weights are those of a training without validation, dropout of captions and
    all."""
    training.run("plain", preset, 5, save_every=1, keep=9)
    training.run("p", preset, 5, save_every=1, keep=9, validation=SETTINGS)
    found = {line["step"]: line["val_loss"] for line in validations(training, "p")}
    assert list(found) == [0, 2, 4, 5]
    for step in (2, 4, 5):
        assert found[step] == held_out_loss(training, "sdxl", step)
    for step in (3, 5):
        assert training.hashes("p", step) == training.hashes("plain", step)
