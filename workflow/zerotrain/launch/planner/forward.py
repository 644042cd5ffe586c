"""Forward pass and loss of one micro batch, for each family, with the tensor shapes of training.

Values do not matter here, so they are zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from zerotrain.errors import PipelineError
from zerotrain.launch.planner.architecture import Architecture
from zerotrain.launch.planner.shape import (
    SIZE_NUMBERS,
    Shape,
    conditioning_tokens,
    pixels_per_latent,
    text_tokens,
)

Loss = Callable[[], torch.Tensor]
"""Function that runs the model once and returns the scalar loss."""


def loss_of(
    model: torch.nn.Module, architecture: Architecture, shape: Shape, dtype: torch.dtype
) -> Loss:
    """Return the function of the training loss of one micro batch.

    Args:
        model: The trained part, on CPU (real or fake).
        architecture: Its architecture.
        shape: Size of the micro batch.
        dtype: Type of the model's parameters, to which latents and embeddings are cast.

    Raises:
        PipelineError: the resolution is not a multiple of the model's patch size in pixels, or
            exceeds its positions, or the family has no loss here.
    """
    if architecture.family not in _LOSSES:
        raise PipelineError(
            f"family: {architecture.family} cannot be planned",
            hint="name a launch preset other than auto; launch/planner/forward.py says what "
            "planning takes",
        )
    return _LOSSES[architecture.family](model, architecture, shape, dtype)


def _latent_side(architecture: Architecture, shape: Shape, patch: int) -> int:
    pixels = pixels_per_latent(architecture)
    if shape.resolution % (pixels * patch):
        raise PipelineError(
            f"resolution {shape.resolution} is no multiple of {pixels * patch}, which "
            f"{architecture.source} divides images into",
            hint=f"choose a multiple of {pixels * patch}",
        )
    return shape.resolution // pixels


def _squared_error(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    each = (prediction.float() - target).square().mean(dim=tuple(range(1, target.ndim)))
    return each.mean()


def _sdxl(
    model: torch.nn.Module, architecture: Architecture, shape: Shape, dtype: torch.dtype
) -> Loss:
    config, b = architecture.trained.config, shape.batch
    patch = 2 ** (len(config["block_out_channels"]) - 1)
    side = _latent_side(architecture, shape, patch)
    sizes = SIZE_NUMBERS * config["addition_time_embed_dim"]
    pooled = config["projection_class_embeddings_input_dim"] - sizes
    noisy = torch.zeros(b, config["in_channels"], side, side)
    target = torch.zeros_like(noisy)
    timesteps = torch.zeros(b, dtype=torch.int64)
    text = torch.zeros(b, text_tokens(architecture, shape), config["cross_attention_dim"])
    added = {"text_embeds": torch.zeros(b, pooled), "time_ids": torch.zeros(b, SIZE_NUMBERS)}

    def loss() -> torch.Tensor:
        prediction = model(
            noisy.to(dtype),
            timesteps,
            encoder_hidden_states=text.to(dtype),
            added_cond_kwargs={name: value.to(dtype) for name, value in added.items()},
            return_dict=False,
        )[0]
        return _squared_error(prediction, target)

    return loss


def _sd3(
    model: torch.nn.Module, architecture: Architecture, shape: Shape, dtype: torch.dtype
) -> Loss:
    config, b = architecture.trained.config, shape.batch
    side = _latent_side(architecture, shape, config["patch_size"])
    most = config["pos_embed_max_size"] * config["patch_size"] * pixels_per_latent(architecture)
    if shape.resolution > most:
        raise PipelineError(
            f"resolution {shape.resolution}: {architecture.source} has positions for images of up "
            f"to {most} px a side",
            hint=f"choose {most} or less (nano and micro are built for the first phase's images)",
        )
    noisy = torch.zeros(b, config["in_channels"], side, side)
    target = torch.zeros_like(noisy)
    text = torch.zeros(b, text_tokens(architecture, shape), config["joint_attention_dim"])
    pooled = torch.zeros(b, config["pooled_projection_dim"])
    timesteps = torch.zeros(b)

    def loss() -> torch.Tensor:
        prediction = model(
            hidden_states=noisy.to(dtype),
            timestep=timesteps,
            encoder_hidden_states=text.to(dtype),
            pooled_projections=pooled.to(dtype),
            return_dict=False,
        )[0]
        return _squared_error(prediction, target)

    return loss


def _qwen_image(
    model: torch.nn.Module, architecture: Architecture, shape: Shape, dtype: torch.dtype
) -> Loss:
    config, b = architecture.trained.config, shape.batch
    side = _latent_side(architecture, shape, config["patch_size"]) // config["patch_size"]
    further = conditioning_tokens(architecture, shape, side * side)
    noisy = torch.zeros(b, side * side + further, config["in_channels"])
    target = torch.zeros(b, side * side, config["in_channels"])
    grids = [(1, side, side)] * (1 + shape.conditioning_images)
    text = torch.zeros(b, text_tokens(architecture, shape), config["joint_attention_dim"])
    timesteps = torch.zeros(b)

    def loss() -> torch.Tensor:
        prediction = model(
            hidden_states=noisy.to(dtype),
            timestep=timesteps.to(dtype),
            encoder_hidden_states=text.to(dtype),
            encoder_hidden_states_mask=None,
            img_shapes=[grids] * b,
            return_dict=False,
        )[0]
        return _squared_error(prediction[:, : side * side], target)

    return loss


def _flux(
    model: torch.nn.Module, architecture: Architecture, shape: Shape, dtype: torch.dtype
) -> Loss:
    config, b = architecture.trained.config, shape.batch
    side = _latent_side(architecture, shape, 2) // 2
    tokens = text_tokens(architecture, shape)
    further = conditioning_tokens(architecture, shape, side * side)
    noisy = torch.zeros(b, side * side + further, config["in_channels"])
    target = torch.zeros(b, side * side, config.get("out_channels") or config["in_channels"])
    text = torch.zeros(b, tokens, config["joint_attention_dim"])
    pooled = torch.zeros(b, config["pooled_projection_dim"])
    timesteps = torch.zeros(b)
    guidance = torch.ones(b) if config["guidance_embeds"] else None

    def loss() -> torch.Tensor:
        prediction = model(
            hidden_states=noisy.to(dtype),
            encoder_hidden_states=text.to(dtype),
            pooled_projections=pooled.to(dtype),
            timestep=timesteps.to(dtype),
            guidance=guidance,
            img_ids=torch.zeros(side * side + further, 3, dtype=dtype),
            txt_ids=torch.zeros(tokens, 3, dtype=dtype),
            return_dict=False,
        )[0]
        return _squared_error(prediction[:, : side * side], target)

    return loss


def _language_model(
    model: torch.nn.Module, architecture: Architecture, shape: Shape, dtype: torch.dtype
) -> Loss:
    tokens = torch.zeros(shape.batch, text_tokens(architecture, shape), dtype=torch.int64)

    def loss() -> torch.Tensor:
        found: torch.Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return found

    return loss


_LOSSES: Mapping[str, Callable[[Any, Architecture, Shape, torch.dtype], Loss]] = {
    "sdxl": _sdxl,
    "sd3": _sd3,
    "qwen_image": _qwen_image,
    "flux": _flux,
    "causal_lm": _language_model,
    "seq2seq_lm": _language_model,
}
