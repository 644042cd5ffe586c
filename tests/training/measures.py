"""Validation of tiny trainings: its settings, what it logged, and the same loss from outside."""

from __future__ import annotations

from typing import Any

import torch
from tests.builders.phases import SEED
from tests.training.conftest import Training

from zerotrain.cache.reader import Cache, read_cache
from zerotrain.launch.files import read_run_yaml
from zerotrain.models.families import load_family
from zerotrain.models.trainable import choose_trained, trained_parameters
from zerotrain.state.position import MASTER
from zerotrain.training.reporting.holdout_loss import HeldOutImages, HeldOutText, holdout_loss

SETTINGS: dict[str, Any] = {
    "eval_steps": 2, "eval_on_start": True, "max_samples": 64, "batch_size": 8,
    "metric_for_best_model": "val_loss", "load_best_model_at_end": False,
    "early_stopping_patience": None, "early_stopping_threshold": 0.0,
}  # fmt: skip


def validations(training: Training, name: str) -> list[dict[str, Any]]:
    """What the log says of validations."""
    return [line for line in training.log(name) if "val_loss" in line]


def measured(model: Any, family: str, training: Training) -> float:
    """What an evaluation finds of a model."""
    cache = read_cache(training.cache)
    held_out: Any = (
        HeldOutImages(cache, SEED) if isinstance(cache, Cache) else HeldOutText(cache, 256)
    )
    objective = load_family(family).objective(training.base)
    return holdout_loss(model, objective, held_out, torch.device("cpu"), held_out.batches(8))


def weights(training: Training, family: str, name: str, step: int, slot: str = MASTER) -> Any:
    """The model of a checkpoint, by its own weights or by their average."""
    source = training.checkpoint(name, step)
    phase = read_run_yaml(training.folder / name / "launch" / "run.yaml")
    model = choose_trained(
        load_family(family).load_model(training.base), phase.adapter, [], seed=SEED
    )
    for parameter_name, parameter in trained_parameters(model).items():
        parameter.data = source.tensor(parameter_name, slot)
    return model.eval()
