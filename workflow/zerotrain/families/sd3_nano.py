"""A small SD3 of the real classes, built from a seed: the presets `nano` and `micro`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel
from transformers import CLIPTextModelWithProjection, T5EncoderModel

from zerotrain.families.nano import (
    PIXELS_PER_LATENT,
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
HEAD_WIDTH = 32
LAYERS = {"nano": 4, "micro": 6}
"""Transformers of 2.3 and 21.5 million parameters."""


def build_nano(
    captions: Sequence[str],
    images: Sequence[Image],
    seed: int,
    out: Path,
    *,
    preset: str = "nano",
) -> None:
    """Write the model into `out` in diffusers' layout; equal arguments give equal files."""
    side = images[0].width
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        clip, t5 = train_tokenizer(captions), train_t5_tokenizer(captions)
        tokenizers = {"tokenizer": clip, "tokenizer_2": clip, "tokenizer_3": t5}
        autoencoder = build_autoencoder(side)
        mean, std = fit_autoencoder(autoencoder, images, seed)
        autoencoder.register_to_config(scaling_factor=1 / std, shift_factor=mean)
        pipeline = pipeline_class("StableDiffusion3Pipeline")(
            vae=autoencoder,
            **build_models(preset, tokenizers, side, autoencoder.config.latent_channels),
            **tokenizers,
            scheduler=FlowMatchEulerDiscreteScheduler(),
        )
    pipeline.save_pretrained(out)


def build_models(
    preset: str, tokenizers: Mapping[str, Any], side: int, channels: int
) -> dict[str, Any]:
    """The models beside the autoencoder, for images of this side and latents of these channels."""
    width = TEXT_WIDTH[preset]
    clip = text_config(tokenizers["tokenizer"], width)
    return {
        "text_encoder": CLIPTextModelWithProjection(clip),
        "text_encoder_2": CLIPTextModelWithProjection(clip),
        "text_encoder_3": T5EncoderModel(t5_config(tokenizers["tokenizer_3"], width)),
        "transformer": build_transformer(side, channels, preset),
    }


def build_transformer(side: int, channels: int = 4, preset: str = "nano") -> Any:
    """SD3's transformer in small."""
    return SD3Transformer2DModel(
        sample_size=side // PIXELS_PER_LATENT,
        patch_size=1,
        in_channels=channels,
        out_channels=channels,
        num_layers=LAYERS[preset],
        num_attention_heads=HEADS[preset],
        attention_head_dim=HEAD_WIDTH,
        joint_attention_dim=2 * TEXT_WIDTH[preset],
        caption_projection_dim=HEADS[preset] * HEAD_WIDTH,
        pooled_projection_dim=2 * TEXT_WIDTH[preset],
        # SD3 has positions for images three times as large, a third of a step apart; with those so
        # small a model learns slowly.
        pos_embed_max_size=side // PIXELS_PER_LATENT,
    )
