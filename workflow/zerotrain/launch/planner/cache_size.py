"""Bytes that the cache stage stores per sample, and bytes of the encoders that it loads."""

from __future__ import annotations

from zerotrain.config.families import LANGUAGE_MODELS
from zerotrain.launch.planner.architecture import Architecture, Part
from zerotrain.launch.planner.inputs import FP32
from zerotrain.launch.planner.shape import (
    SIZE_NUMBERS,
    Shape,
    pixels_per_latent,
    takes_fill,
    text_tokens,
)
from zerotrain.launch.planner.storage import DTYPE_BYTES


def cached_bytes(
    architecture: Architecture, shape: Shape, dtype: str, *, flips: bool
) -> tuple[int, int]:
    """Return the bytes of a sample's latents and a caption's embeddings; 0 for language models.

    Args:
        architecture: The model.
        shape: Resolution and tokens; the batch is not used.
        dtype: The cache's type: fp32, bf16 or fp16.
        flips: Whether each image's mirror image is also encoded (data.random_flip).
    """
    if architecture.family in LANGUAGE_MODELS:
        return 0, 0
    config = architecture.trained.config
    if architecture.family == "sdxl":
        width = config["cross_attention_dim"]
        sizes = SIZE_NUMBERS * config["addition_time_embed_dim"]
        pooled = config["projection_class_embeddings_input_dim"] - sizes
    else:
        width, pooled = config["joint_attention_dim"], config.get("pooled_projection_dim", 0)
    text = text_tokens(architecture, shape) * width + pooled
    return (1 + flips) * DTYPE_BYTES[dtype] * _latent_numel(architecture, shape), DTYPE_BYTES[
        dtype
    ] * text


def conditioning_bytes(architecture: Architecture, shape: Shape, dtype: str) -> int:
    """Return the bytes of one sample's encoded conditioning images; arguments as above."""
    if not shape.conditioning_images:
        return 0
    if takes_fill(architecture):  # the masked image's latents, and the mask's pixels
        mask = shape.resolution**2
        return DTYPE_BYTES[dtype] * (_latent_numel(architecture, shape) + mask)
    return DTYPE_BYTES[dtype] * shape.conditioning_images * _latent_numel(architecture, shape)


def _latent_numel(architecture: Architecture, shape: Shape) -> int:
    """Return the elements of the latents of one image."""
    config = architecture.trained.config
    # A transformer with patches of 2 x 2 has four times the channels of its latents.
    channels = config["in_channels"] // (4 if architecture.family in ("qwen_image", "flux") else 1)
    if architecture.family == "flux" and config.get("out_channels"):
        channels = config["out_channels"] // 4  # a masked image only adds to in_channels
    return int(channels * (shape.resolution // pixels_per_latent(architecture)) ** 2)


def encoder_bytes(architecture: Architecture, dtype: str) -> dict[str, int]:
    """Return the bytes of each part that the cache stage loads; training loads none of them.

    The device has either the autoencoder or the text encoders
    (zerotrain/models/families/pipelines.py: PipelineEncoders); the host loads all.

    Args:
        architecture: The model.
        dtype: Type of the text encoders: the cache's, or fp32 on a CPU. The autoencoder is fp32.
    """
    return {
        name: (FP32 if name == "vae" else DTYPE_BYTES[dtype]) * _count(part, architecture.source)
        for name, part in architecture.encoders.items()
    }


def _count(part: Part, source: str) -> int:
    if part.parameters is not None:
        return part.parameters
    from zerotrain.launch.planner.model import parameters_of  # building a part needs torch

    return parameters_of(part, source)
