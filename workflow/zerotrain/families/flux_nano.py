"""A small Flux of the real classes, built from a seed: the presets `nano` and `micro`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel
from transformers import CLIPTextModel, T5EncoderModel

from zerotrain.families.identity import identity_autoencoder
from zerotrain.families.nano import (
    TEXT_WIDTH,
    build_autoencoder,
    fit_autoencoder,
    t5_config,
    text_config,
    train_t5_tokenizer,
    train_tokenizer,
)
from zerotrain.families.pipelines import pipeline_class

if TYPE_CHECKING:
    from PIL.Image import Image

HEADS = {"nano": 4, "micro": 10}
LAYERS = {"nano": 2, "micro": 3}
"""Of two streams, and as many of one. Transformers of 1.8 and 16.3 million parameters."""


def build_nano(
    captions: Sequence[str],
    images: Sequence[Image],
    seed: int,
    out: Path,
    *,
    preset: str = "nano",
    identity: bool = False,
) -> None:
    """Write the model into `out` in diffusers' layout; equal arguments give equal files.

    With `identity`, pixels are the latents.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizers = {
            "tokenizer": train_tokenizer(captions),
            "tokenizer_2": train_t5_tokenizer(captions),
        }
        side = images[0].width
        if identity:
            autoencoder = identity_autoencoder("AutoencoderKL")
        else:
            autoencoder = build_autoencoder(side)
            mean, std = fit_autoencoder(autoencoder, images, seed)
            autoencoder.register_to_config(scaling_factor=1 / std, shift_factor=mean)
        pipeline = pipeline_class("FluxPipeline")(
            vae=autoencoder,
            **build_models(preset, tokenizers, side, autoencoder.config.latent_channels),
            **tokenizers,
            scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        )
    pipeline.save_pretrained(out)


def build_models(
    preset: str, tokenizers: Mapping[str, Any], side: int, channels: int
) -> dict[str, Any]:
    """The models beside the autoencoder, for latents of these channels and any side."""
    width = TEXT_WIDTH[preset]
    return {
        "text_encoder": CLIPTextModel(text_config(tokenizers["tokenizer"], width)),
        "text_encoder_2": T5EncoderModel(t5_config(tokenizers["tokenizer_2"], width)),
        "transformer": build_transformer(channels, preset),
    }


def build_transformer(latent_channels: int, preset: str = "nano") -> Any:
    """Flux's transformer in small; it takes no guidance."""
    return FluxTransformer2DModel(
        in_channels=4 * latent_channels,
        num_layers=LAYERS[preset],
        num_single_layers=LAYERS[preset],
        attention_head_dim=32,
        num_attention_heads=HEADS[preset],
        axes_dims_rope=(8, 12, 12),
        joint_attention_dim=2 * TEXT_WIDTH[preset],
        pooled_projection_dim=TEXT_WIDTH[preset],
        guidance_embeds=False,
    )
