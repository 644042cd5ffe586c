"""Prodigy against its authors' package: what prodigyopt 1.1.2 gives for the same gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zerotrain.training.optim.prodigy import Prodigy


@pytest.mark.parametrize(
    ("arguments", "d"),
    [
        ({}, 0.2855217299902236),
        ({"weight_decay": 1e-2}, 0.28518360477568355),
        (
            {"use_bias_correction": True, "safeguard_warmup": True, "weight_decay": 1e-4},
            0.0015914387994278526,
        ),
        ({"weight_decay": 0.1, "decouple": False, "d_coef": 2.0}, 0.5042465088237887),
    ],
)
def test_the_estimate_is_the_packages(arguments: dict[str, Any], d: float) -> None:
    """After 60 steps in float64, for two parameters that share it."""
    torch.manual_seed(0)
    shapes = ((5, 3), (7,))
    held = [torch.nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in shapes]
    made = Prodigy(held, lr=1.0, betas=(0.9, 0.999), **arguments)
    for _ in range(60):
        for one in held:
            one.grad = torch.sin(one.detach() * 3) + one.detach()
        made.step()
    for one in held:
        assert float(made.state[one]["d"]) == pytest.approx(d, rel=1e-9)


def test_a_gradient_of_zeros_moves_nothing() -> None:
    """There is nothing to divide by."""
    weights = torch.nn.Parameter(torch.ones(3))
    weights.grad = torch.zeros(3)
    made = Prodigy([weights])
    made.step()
    assert weights.tolist() == [1.0, 1.0, 1.0]
    assert float(made.state[weights]["d"]) == 1e-6


@pytest.mark.parametrize(("key", "value"), [("d0", 0.0), ("beta3", 1.0), ("eps", -1.0)])
def test_values_out_of_range(key: str, value: float) -> None:
    with pytest.raises(ValueError, match=key):
        Prodigy([torch.nn.Parameter(torch.ones(3))], **{key: value})
