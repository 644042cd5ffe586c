"""A small SD3 of the real classes, built from a seed: the preset `nano`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel
from transformers import CLIPTextModelWithProjection, T5EncoderModel

from zerotrain.families.nano import (
    PIXELS_PER_LATENT,
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

HEADS, HEAD_WIDTH = 4, 32
LAYERS = 4


def build_nano(captions: Sequence[str], images: Sequence[Image], seed: int, out: Path) -> None:
    """Write the model into `out` in diffusers' layout; equal arguments give equal files."""
    side = images[0].width
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        clip, t5 = train_tokenizer(captions), train_t5_tokenizer(captions)
        autoencoder = build_autoencoder(side)
        mean, std = fit_autoencoder(autoencoder, images, seed)
        autoencoder.register_to_config(scaling_factor=1 / std, shift_factor=mean)
        pipeline = pipeline_class("StableDiffusion3Pipeline")(
            vae=autoencoder,
            text_encoder=CLIPTextModelWithProjection(text_config(clip)),
            text_encoder_2=CLIPTextModelWithProjection(text_config(clip)),
            text_encoder_3=T5EncoderModel(t5_config(t5)),
            tokenizer=clip,
            tokenizer_2=clip,
            tokenizer_3=t5,
            transformer=build_transformer(side),
            scheduler=FlowMatchEulerDiscreteScheduler(),
        )
    pipeline.save_pretrained(out)


def build_transformer(side: int) -> Any:
    """SD3's transformer in small."""
    return SD3Transformer2DModel(
        sample_size=side // PIXELS_PER_LATENT,
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=LAYERS,
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_WIDTH,
        joint_attention_dim=2 * TEXT_WIDTH,
        caption_projection_dim=HEADS * HEAD_WIDTH,
        pooled_projection_dim=2 * POOLED_WIDTH,
        # SD3 has positions for images three times as large, a third of a step apart; with those so
        # small a model learns slowly.
        pos_embed_max_size=side // PIXELS_PER_LATENT,
    )
