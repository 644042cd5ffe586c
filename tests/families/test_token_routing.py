"""TREAD against a forward that is written by hand over the blocks of diffusers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from tests.training.tiny_models import MODELS, WAYS

from zerotrain.models.families.flux import FluxObjective
from zerotrain.models.families.token_routing import ROUTE, route_tokens

TOKENS = 16
ROUTES = [
    {"selection_ratio": 0.5, "start_layer_idx": 1, "end_layer_idx": -2},
    {"selection_ratio": 0.25, "start_layer_idx": -1, "end_layer_idx": -1},
]
KEPT = (8, 12)


def normal(*shape: int) -> torch.Tensor:
    """Numbers that depend on the shape alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def orders(kept: tuple[int, ...] = KEPT) -> torch.Tensor:
    """Orders of the tokens of two samples, other ones for each."""
    source = torch.Generator().manual_seed(3)
    found = torch.stack(
        [torch.stack([torch.randperm(TOKENS, generator=source) for _ in kept]) for _ in range(2)]
    )
    for number, count in enumerate(kept):
        found[:, number, :count] = found[:, number, :count].sort().values
    return found


def inputs(name: str, samples: int = 2) -> dict[str, Any]:
    """Samples of a tiny model, with tokens at places of their own."""
    common = {
        "encoder_hidden_states": normal(samples, 5, 16),
        "pooled_projections": normal(samples, 8),
        "timestep": torch.tensor([0.3, 0.5][:samples]),
        "return_dict": False,
    }
    if name == "sd3":
        return {**common, "hidden_states": normal(samples, 4, 8, 8)}
    places = torch.cartesian_prod(*(torch.arange(n, dtype=torch.float32) for n in (1, 4, 4)))
    return {
        **common,
        "hidden_states": normal(samples, TOKENS, 4),
        "img_ids": places,
        "txt_ids": torch.zeros(5, 3),
    }


def model_of(name: str, routes: list[dict[str, Any]] | None = None) -> Any:
    """The tiny model, always with the same weights; of sd3 with a block more."""
    model: Any = MODELS[name].make(adapter=False)
    if routes is not None:
        route_tokens(model, routes)
    return model


def forward(model: Any, name: str, route: torch.Tensor | None, samples: int = 2) -> torch.Tensor:
    """The model's answer, routed if an order is given."""
    attention = None if route is None else {ROUTE: route}
    answer: torch.Tensor = model(**inputs(name, samples), joint_attention_kwargs=attention)[0]
    return answer


def flux_by_hand(model: Any, route: torch.Tensor) -> torch.Tensor:
    """Flux's forward with the middle layers skipped by single tokens, sample by sample."""
    given, answers = inputs("flux"), []
    for place in range(2):
        hidden = model.x_embedder(given["hidden_states"][place : place + 1])
        text = model.context_embedder(given["encoder_hidden_states"][place : place + 1])
        time = model.time_text_embed(
            given["timestep"][place : place + 1] * 1000,
            given["pooled_projections"][place : place + 1],
        )
        blocks = [*model.transformer_blocks, *model.single_transformer_blocks]
        spans = {1: 0, 2: 0, 3: 1}
        for layer, block in enumerate(blocks):
            kept = list(range(TOKENS))
            if layer in spans:
                kept = route[place, spans[layer], : KEPT[spans[layer]]].tolist()
            places = torch.cat([given["txt_ids"], given["img_ids"][kept]])
            text, out = block(hidden[:, kept], text, time, model.pos_embed(places))
            hidden = hidden.clone()
            for row, token in enumerate(kept):
                hidden[:, token] = out[:, row]
        answers.append(model.proj_out(model.norm_out(hidden, time)))
    return torch.cat(answers)


def test_a_routed_forward_is_the_one_written_by_hand():
    """Each sample has its own tokens; one route crosses from double-stream to single-stream blocks.
    Within 1e-6."""
    expected = flux_by_hand(model_of("flux"), orders())
    found = forward(model_of("flux", ROUTES), "flux", orders())
    assert (found - expected).abs().max() <= 1e-6
    plain = forward(model_of("flux"), "flux", None)
    assert (found - plain).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["flux", "sd3"])
def test_nothing_changes_where_no_token_passes_by(name):
    """Bit by bit: without an order of tokens, as in sampling, and with a ratio of 0."""
    plain = forward(model_of(name), name, None, samples=1)
    assert torch.equal(forward(model_of(name, ROUTES), name, None, samples=1), plain)
    routes = [{**ROUTES[0], "selection_ratio": 0.0}]
    everything = torch.arange(TOKENS).expand(1, 1, TOKENS)
    assert torch.equal(forward(model_of(name, routes), name, everything, samples=1), plain)


def test_tokens_of_conditioning_images_are_routed_with_those_of_the_image():
    """Two conditioning images follow the image: nothing changes with a ratio of 0, and what they
    lose changes the answer for the image."""
    latents = normal(1, 1, 8, 8)
    batch = {
        "prompt_embeds": normal(1, 5, 16),
        "pooled_prompt_embeds": normal(1, 8),
        "conditioning_latents": normal(1, 2, 1, 8, 8),
    }
    objective = FluxObjective(FlowMatchEulerDiscreteScheduler(), None, guidance=None)
    routes = [{**ROUTES[0], "selection_ratio": 0.0}], [{**ROUTES[0], "selection_ratio": 0.5}]
    plain, unrouted, routed = (
        objective.predict(model_of("flux", own), latents, torch.tensor([300.0]), batch | order)
        for own, order in (
            (None, {}),
            (routes[0], {ROUTE: torch.arange(3 * TOKENS)[None, None]}),
            (
                routes[1],
                {ROUTE: torch.arange(3 * TOKENS)[None, None]},
            ),  # half of the first and the second pass by
        )
    )
    assert torch.equal(unrouted, plain)
    assert (routed - plain).abs().max() > 1e-3


def gradients(name: str, way: str | None, *, compiled: bool = False) -> dict[str, torch.Tensor]:
    """Gradients of a routed model that is recomputed in this way."""
    model = model_of(name, ROUTES)
    if way:
        model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=WAYS[way])
    if compiled:
        model.compile(backend="eager", dynamic=False)
    forward(model, name, orders()).float().square().mean().backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["flux", "sd3"])
def test_gradients_reach_every_parameter_and_survive_recomputation(name):
    """All that have one in the plain model; the same bits recomputed by torch, within 1e-6 by
    DeepSpeed."""
    plain = model_of(name)
    forward(plain, name, None).float().square().mean().backward()
    expected = gradients(name, None)
    for parameter, tensor in plain.named_parameters():
        reached = tensor.grad is not None and bool(tensor.grad.any())
        assert not reached or expected[parameter].any(), parameter
    for way in ("torch", "deepspeed"):
        found = gradients(name, way)
        for parameter, gradient in expected.items():
            bound = 1e-6 * gradient.abs().max() + 1e-9 if way == "deepspeed" else 0
            assert (found[parameter] - gradient).abs().max() <= bound, (way, parameter)


@pytest.mark.soak
def test_a_compiled_model_routes_the_same():
    """As torch.compile traces it."""
    expected, found = gradients("flux", None), gradients("flux", None, compiled=True)
    assert all((found[n] - g).abs().max() <= 1e-6 for n, g in expected.items())
