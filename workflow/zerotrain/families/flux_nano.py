"""A small Flux of the real classes, built from a seed: the preset `nano`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel
from transformers import CLIPTextModel, T5EncoderModel

from zerotrain.families.identity import identity_autoencoder
from zerotrain.families.nano import (
    POOLED_WIDTH,
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


def build_nano(
    captions: Sequence[str],
    images: Sequence[Image],
    seed: int,
    out: Path,
    *,
    identity: bool = False,
) -> None:
    """Write the model into `out` in diffusers' layout; equal arguments give equal files.

    With `identity`, pixels are the latents.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer, tokenizer_2 = train_tokenizer(captions), train_t5_tokenizer(captions)
        if identity:
            autoencoder = identity_autoencoder("AutoencoderKL")
        else:
            autoencoder = build_autoencoder(images[0].width)
            mean, std = fit_autoencoder(autoencoder, images, seed)
            autoencoder.register_to_config(scaling_factor=1 / std, shift_factor=mean)
        pipeline = pipeline_class("FluxPipeline")(
            vae=autoencoder,
            text_encoder=CLIPTextModel(text_config(tokenizer)),
            text_encoder_2=T5EncoderModel(t5_config(tokenizer_2)),
            tokenizer=tokenizer,
            tokenizer_2=tokenizer_2,
            transformer=build_transformer(autoencoder.config.latent_channels),
            scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        )
    pipeline.save_pretrained(out)


def build_transformer(latent_channels: int) -> Any:
    """Flux's transformer in small: two blocks of two streams, two of one; it takes no guidance."""
    return FluxTransformer2DModel(
        in_channels=4 * latent_channels,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=32,
        num_attention_heads=4,
        axes_dims_rope=(8, 12, 12),
        joint_attention_dim=2 * TEXT_WIDTH,
        pooled_projection_dim=POOLED_WIDTH,
        guidance_embeds=False,
    )
