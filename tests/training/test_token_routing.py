"""TREAD in training: which tokens pass by depends on the sample's number alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.builders.phases import make_tiny_phase
from tests.training.inputs import LORA, cache_of, image_values

from zerotrain.models.families.token_routing import ROUTE
from zerotrain.training.batches import Batches

CPU = torch.device("cpu")
TREAD = {"routes": [{"selection_ratio": 0.5, "start_layer_idx": 1, "end_layer_idx": -2}]}


def settings(family: str) -> dict[str, Any]:
    """What a phase of a nano model has of its own."""
    return {**image_values(family), "lr_warmup_steps": 0}


def patches(latents: torch.Tensor) -> int:
    """Tokens of latents [B, C, h, w], of 2 x 2 each."""
    return latents.shape[-2] * latents.shape[-1] // 4


def test_a_batch_has_routes_and_all_else_as_it_was():
    """Sample by sample the same at any batch size, and none without the key."""
    plain = make_tiny_phase("a", "torch", 4).with_values(**settings("flux"))
    routed = plain.with_values(tread_config=TREAD)
    together = Batches(cache_of(), routed, patches).batch(6, 4, CPU)
    route = together.pop(ROUTE)
    assert route.shape == (4, 1, 16)
    assert route.dtype == torch.int64
    expected = Batches(cache_of(), plain).batch(6, 4, CPU)
    assert expected.keys() == together.keys()
    assert all(torch.equal(expected[name], together[name]) for name in expected)
    alone = [Batches(cache_of(), routed, patches).batch(p, 1, CPU)[ROUTE] for p in range(6, 10)]
    assert torch.equal(torch.cat(alone), route)


def test_tokens_of_conditioning_images_are_routed_too():
    """They follow the image's in the sequence of the model."""
    phase = make_tiny_phase("a", "torch", 4).with_values(**settings("flux"), tread_config=TREAD)
    cache = cache_of(conditioning_latents=torch.zeros(2, 4, 8, 8))
    route = Batches(cache, phase, patches).batch(0, 1, CPU)[ROUTE]
    assert route.sort().values.flatten().tolist() == list(range(48))


@pytest.mark.slow
def test_the_loss_differs_where_tokens_pass_by_and_only_there(image_training):
    """Samples one by one, a ratio of 0 trains bit by bit as without routes."""
    training = image_training("flux")
    changes = {**settings("flux"), "global_batch_size": 1}
    plain = training.run("plain", "torch", 2, **changes)
    none = {"routes": [{**TREAD["routes"][0], "selection_ratio": 0.0}]}
    assert training.run("none", "torch", 2, **changes, tread_config=none) == plain
    routed = training.run("routed", "torch", 2, **changes, tread_config=TREAD)
    assert all(abs(a - b) > 1e-6 for a, b in zip(routed, plain, strict=True))


@pytest.mark.slow
def test_a_resumed_training_and_one_of_two_processes_route_the_same(image_training):
    """Resumed bit by bit; two processes within 1e-5, as without routes; and the loss falls."""
    training = image_training("flux")
    changes = {**settings("flux"), "tread_config": TREAD, "learning_rate": 3e-3}
    whole = training.assert_resumes("torch", 15, 30, **changes)
    assert sum(whole[-10:]) < 0.95 * sum(whole[:10])
    two = training.run("two", "torch", 4, **changes, num_processes=2)
    assert max(abs(a - b) for a, b in zip(two, whole[:4], strict=True)) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("family", ["flux", "sd3"])
def test_engines_and_recomputation_route_the_same(family, image_training):
    """ZeRO-3 with gradient checkpointing trains an adapter as PyTorch without, within 1e-4."""
    training = image_training(family)
    changes = {**settings(family), "tread_config": TREAD, "lora": LORA}
    plain = training.run("plain", "torch", 4, **changes)
    for preset in ("torch", "zero3_offload"):
        name = f"{preset}-recomputed"
        found = training.run(name, preset, 4, **changes, gradient_checkpointing=True)
        apart = max(abs(a - b) for a, b in zip(found, plain, strict=True))
        assert apart <= (0 if preset == "torch" else 1e-4), preset
