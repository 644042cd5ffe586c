"""No float64 on the training's device: MPS has none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler
from tests.builders.phases import make_tiny_phase
from tests.training.inputs import cache_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zerotrain.cache.reader import stacked
from zerotrain.models.families import Batch
from zerotrain.models.families.objectives import (
    DenoisingObjective,
    FlowMatchingObjective,
    NoiseSchedule,
)
from zerotrain.training.batches import Batches

DEVICE = torch.device("meta")
"""In place of one that is not here: it computes no numbers, and types are what it would have."""


class NoFloat64(TorchDispatchMode):
    """Refuses float64 on the device, as MPS does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for found in tree_leaves(result):
            if isinstance(found, torch.Tensor) and found.device.type == DEVICE.type:
                assert found.dtype != torch.float64, func
        return result


class Denoising(DenoisingObjective):
    """An objective without a model."""

    def predict(self, model: Any, noisy: torch.Tensor, *others: Any) -> torch.Tensor:
        return noisy


class FlowMatching(FlowMatchingObjective):
    """An objective without a model."""

    def predict(self, model: Any, noisy: torch.Tensor, *others: Any) -> torch.Tensor:
        return noisy

    def image_tokens(self, latents: torch.Tensor) -> int:
        return latents[0, 0].numel()


def objectives() -> list[Any]:
    """Each way to draw timesteps and to weight losses."""
    alphas = DDPMScheduler().alphas_cumprod.float()
    return [
        *(Denoising(NoiseSchedule(alphas, kind), 5.0) for kind in ("epsilon", "v_prediction")),
        *map(flow_matching, ("none", "logit_normal", "mode", "sigma_sqrt", "cosmap")),
    ]


def flow_matching(scheme: str) -> FlowMatching:
    """A flow matching objective."""
    return FlowMatching(FlowMatchEulerDiscreteScheduler(), {"weighting_scheme": scheme})


def batch() -> Batch:
    """Three samples on the device."""
    draws = torch.linspace(0.1, 0.9, 3, dtype=torch.float64)
    samples = [
        {"latents": torch.randn(4, 8, 8), "noise": torch.randn(4, 8, 8), "uniform": one}
        for one in draws
    ]
    return stacked(samples, DEVICE)


def test_a_training_places_batches_without_float64_on_the_device() -> None:
    """Numbers that choose timesteps stay on the host, all else is placed; a loss is made of it."""
    batches = Batches(cache_of(), make_tiny_phase("a", "torch", 4))
    with NoFloat64():
        found = batches.batch(0, 3, DEVICE)
        assert {name: one.device.type for name, one in found.items()} == {
            "latents": "meta", "noise": "meta", "uniform": "cpu",
        }  # fmt: skip
        for objective in objectives():
            assert objective.loss(torch.nn.Identity(), found).device.type == "meta"


@pytest.mark.parametrize("number", range(7))
def test_losses_make_no_float64_on_the_device(number: int) -> None:
    """Numbers that choose timesteps are float64 on the host; what is made of them is float32."""
    with NoFloat64():
        loss = objectives()[number].loss(torch.nn.Identity(), batch())
    assert (loss.device.type, loss.dtype, loss.shape) == ("meta", torch.float32, (3,))


def test_weights_that_are_made_on_the_host_leave_the_device_first() -> None:
    """Those of `gaussian` are float64 there; a copy from this device is what cannot be made."""
    with NoFloat64(), pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        flow_matching("gaussian").loss(torch.nn.Identity(), batch())
