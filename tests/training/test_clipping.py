"""Clipping by value cuts each value of the averaged, unscaled gradient, under every engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zerotrain.models.families import load_family
from zerotrain.state.position import MASTER

BOUND = 1e-3
RATE = 10.0
SGD: dict[str, Any] = {
    "optimizer": "sgd", "adam_weight_decay": 0.0, "learning_rate": RATE, "lr_scheduler": "constant",
    "lr_warmup_steps": 0, "adam_beta1": None, "adam_beta2": None, "adam_epsilon": None,
    "gradient_accumulation_steps": 2,
}  # fmt: skip
"""One step subtracts the gradient times the rate."""
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "zero3": ("zero3", {}),
    "torch-fp16-2": ("torch", {"mixed_precision": "fp16", "num_processes": 2}),
    "zero2_offload-bf16": ("zero2_offload", {"mixed_precision": "bf16"}),
}


def weights(training: Any, name: str) -> torch.Tensor:
    """All master weights after one step."""
    source = training.checkpoint(name, 1)
    return torch.cat([source.tensor(one, MASTER).flatten() for one in sorted(source.names)])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_each_value_is_cut_to_the_bound(training, case):
    """The step is that of the whole gradient, cut value by value."""
    preset, own = CASES[case]
    model = load_family("sdxl").load_model(training.base)
    start = torch.cat([p.detach().flatten() for _, p in sorted(model.named_parameters())])
    training.run("whole", preset, 1, max_grad_norm=0.0, **SGD, **own)
    training.run("cut", preset, 1, max_grad_norm=BOUND, grad_clip_method="value", **SGD, **own)
    update = start - weights(training, "whole")
    over = (update.abs() > RATE * BOUND).float().mean()
    assert 0.01 < over < 0.99
    expected = start - update.clamp(-RATE * BOUND, RATE * BOUND)
    torch.testing.assert_close(weights(training, "cut"), expected, rtol=0, atol=5e-7)


@pytest.mark.slow
def test_both_engines_clip_to_the_same_bits(training):
    """With Adam, over several steps, and not as by norm."""
    changes = {"max_grad_norm": BOUND, "gradient_accumulation_steps": 2}
    losses = training.run("t", "torch", 4, grad_clip_method="value", **changes)
    assert training.run("z", "zero2", 4, grad_clip_method="value", **changes) == losses
    assert training.hashes("z", 4) == training.hashes("t", 4)
    assert training.run("n", "torch", 4, **changes) != losses
