"""TREAD: in training, a share of the image tokens skips a range of layers.

Krause et al., "TREAD: Token Routing for Efficient Architecture-agnostic Diffusion Training" (2025),
https://arxiv.org/abs/2501.04765. Tokens and layers are chosen as in SimpleTuner
(simpletuner/helpers/training/tread.py and helpers/models/flux/transformer.py): each route draws its
tokens at random, and layers are counted over double-stream blocks and then single-stream ones.

A token that skips a route leaves it unchanged. So each layer of the route is applied only to the
kept tokens, and its output is put back among all tokens: no layer keeps a tensor for another one,
which recomputed blocks (gradient checkpointing) would lose. The order of the tokens is passed with
the other inputs of a block. Without it, as in sampling and validation, nothing is routed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from zerotrain.config.token_routes import kept_tokens, route_layers

if TYPE_CHECKING:
    from zerotrain.models.families import Batch

ROUTE = "route"
"""Name of the tokens' order in a batch and among the blocks' attention arguments."""
Forward = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""Forward of a block, from its inputs by name to text and image tokens."""


def routing(batch: Batch) -> dict[str, torch.Tensor] | None:
    """Return a transformer's joint_attention_kwargs for a batch; None if nothing is routed."""
    return {ROUTE: batch[ROUTE]} if ROUTE in batch else None


def route_tokens(model: torch.nn.Module, routes: Sequence[Mapping[str, Any]]) -> None:
    """Make a transformer's blocks route tokens whenever it gets their order.

    Args:
        model: A transformer of diffusers whose blocks take `hidden_states` [B, tokens, D],
            `encoder_hidden_states`, `temb`, `joint_attention_kwargs` and maybe `image_rotary_emb`.
        routes: Each with `selection_ratio`, `start_layer_idx` and `end_layer_idx`.

    Raises:
        PipelineError: the model has no such layers.
    """
    blocks: list[Any] = [
        block
        for name in ("transformer_blocks", "single_transformer_blocks")
        for block in getattr(model, name, ())
    ]
    layers = route_layers(routes, len(blocks))
    for place, block in enumerate(blocks):
        number = next((n for n, span in enumerate(layers) if place in span), None)
        ratio = 0.0 if number is None else routes[number]["selection_ratio"]
        block.forward = _routed(block.forward, number, ratio)


def _routed(forward: Forward, number: int | None, ratio: float) -> Forward:
    """Build a block's forward that is part of the route of this number, if any."""
    names = list(inspect.signature(forward).parameters)

    def run(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        attention = given.get("joint_attention_kwargs") or {}
        if ROUTE not in attention:
            return forward(**given)
        others = {name: value for name, value in attention.items() if name != ROUTE}
        given["joint_attention_kwargs"] = others or None
        if number is None:
            return forward(**given)
        order = attention[ROUTE][:, number]
        assert order.shape == given["hidden_states"].shape[:2], "other tokens than were drawn"
        return _apply_to_kept(forward, given, order[:, : kept_tokens(order.shape[1], ratio)])

    return run


def _apply_to_kept(
    forward: Forward, given: Mapping[str, Any], kept: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply a block to the kept tokens [B, K] of each sample; the others are unchanged."""
    hidden: torch.Tensor = given["hidden_states"]
    batch, tokens, width = hidden.shape
    # Rows of a matrix: a deterministic gather along one of three dimensions is slow.
    rows = (kept + tokens * torch.arange(batch, device=kept.device)[:, None]).flatten()
    all_rows = hidden.flatten(0, 1)
    inside = {**given, "hidden_states": all_rows[rows].view(*kept.shape, width)}
    if given.get("image_rotary_emb") is None:
        text, image = forward(**inside)
    else:
        text, image = _apply_to_each(forward, inside, kept, tokens)
    whole = all_rows.to(image.dtype).index_put((rows,), image.flatten(0, 1))
    return text, whole.view(hidden.shape)


def _apply_to_each(
    forward: Forward, given: Mapping[str, Any], kept: torch.Tensor, tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply a block sample by sample, since rotary embeddings have no batch dimension.

    Rotary embeddings are cosines and sines [text tokens + image tokens, D].
    """
    outputs = []
    for place, own in enumerate(kept):
        part = slice(place, place + 1)
        inputs = {n: given[n][part] for n in ("hidden_states", "encoder_hidden_states", "temb")}
        text = len(given["image_rotary_emb"][0]) - tokens
        rows = torch.cat([torch.arange(text, device=own.device), text + own])
        positions = tuple(table[rows] for table in given["image_rotary_emb"])
        outputs.append(forward(**{**given, **inputs, "image_rotary_emb": positions}))
    texts, images = zip(*outputs, strict=True)
    return torch.cat(texts), torch.cat(images)
