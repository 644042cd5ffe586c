"""One micro batch's forward pass and loss, of each family: tensors of the shapes of training.

Values do not matter here, so they are zeros. Text lengths are those that the families' own
pipelines pad to: cached embeddings have them, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zerotrain.errors import PipelineError
from zerotrain.plan.architecture import Architecture

CLIP_TOKENS = 77
TEXT_TOKENS = {"sd3": 256, "qwen_image": 512, "flux": 512}
"""What max_sequence_length is by default; those of SD3 come after CLIP's."""
SEQUENCE_LENGTH = 2048
SIZE_NUMBERS = 6
"""SDXL's original size, crop and target size, two numbers each."""


@dataclass(frozen=True)
class Shape:
    """The size of a micro batch.

    Attributes:
        batch: Samples.
        resolution: Side of square images, or of a square of the same area, in pixels; families of
            images only.
        tokens: Length of the text embeddings (default: what the family's pipeline pads to), or of
            a language model's sequences (default: SEQUENCE_LENGTH). A seq2seq model's source and
            target have it both.
        max_sequence_length: That of config.cache, in place of the family's own.
    """

    batch: int
    resolution: int = 1024
    tokens: int | None = None
    max_sequence_length: int | None = None


Loss = Callable[[], torch.Tensor]
"""Runs the model once and gives the scalar loss."""


def text_tokens(architecture: Architecture, shape: Shape) -> int:
    """Tokens of text of a sample."""
    if shape.tokens is not None:
        return shape.tokens
    family, parts = architecture.family, architecture.parts
    clip = CLIP_TOKENS
    if family in ("sdxl", "sd3") and "text_encoder" in parts:
        clip = int(parts["text_encoder"].config["max_position_embeddings"])
    if family == "sdxl":
        return clip
    if family in TEXT_TOKENS:
        length = shape.max_sequence_length or TEXT_TOKENS[family]
        return clip + length if family == "sd3" else length
    if family == "seq2seq_lm":
        longest = architecture.trained.config.get("max_position_embeddings", SEQUENCE_LENGTH)
        return min(SEQUENCE_LENGTH, int(longest))
    return SEQUENCE_LENGTH


def pixels_per_latent(architecture: Architecture) -> int:
    """Pixels of a side that one latent stands for, as the autoencoder's configuration tells."""
    if "vae" not in architecture.parts:
        return 8
    config = architecture.parts["vae"].config
    steps = config.get("block_out_channels") or config["dim_mult"]
    return int(2 ** (len(steps) - 1))


def loss_of(
    model: torch.nn.Module, architecture: Architecture, shape: Shape, dtype: torch.dtype
) -> Loss:
    """The training loss of one micro batch.

    Args:
        model: The trained part, on CPU (real or fake).
        architecture: Its architecture.
        shape: Size of the micro batch.
        dtype: Type of the model's parameters, to which latents and embeddings are cast.

    Raises:
        PipelineError: the resolution is no multiple of what the model divides images into, or the
            family has no such loss.
    """
    if architecture.family not in _LOSSES:
        raise PipelineError(
            f"family: {architecture.family} cannot be planned",
            hint="name a launch preset other than auto; plan/forward.py says what planning takes",
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
    noisy = torch.zeros(b, side * side, config["in_channels"])
    target = torch.zeros_like(noisy)
    text = torch.zeros(b, text_tokens(architecture, shape), config["joint_attention_dim"])
    timesteps = torch.zeros(b)

    def loss() -> torch.Tensor:
        prediction = model(
            hidden_states=noisy.to(dtype),
            timestep=timesteps.to(dtype),
            encoder_hidden_states=text.to(dtype),
            encoder_hidden_states_mask=None,
            img_shapes=[[(1, side, side)]] * b,
            return_dict=False,
        )[0]
        return _squared_error(prediction, target)

    return loss


def _flux(
    model: torch.nn.Module, architecture: Architecture, shape: Shape, dtype: torch.dtype
) -> Loss:
    config, b = architecture.trained.config, shape.batch
    side = _latent_side(architecture, shape, 2) // 2
    tokens = text_tokens(architecture, shape)
    noisy = torch.zeros(b, side * side, config["in_channels"])
    target = torch.zeros_like(noisy)
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
            img_ids=torch.zeros(side * side, 3, dtype=dtype),
            txt_ids=torch.zeros(tokens, 3, dtype=dtype),
            return_dict=False,
        )[0]
        return _squared_error(prediction, target)

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
