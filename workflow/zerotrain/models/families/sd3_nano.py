"""A small SD3 of the real classes, built from a seed: the presets `nano` and `micro`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel
from transformers import CLIPTextModelWithProjection, T5EncoderModel

from zerotrain.models.families.nano import (
    PIXELS_PER_LATENT,
    TEXT_WIDTH,
    t5_config,
    text_config,
    train_t5_tokenizer,
    train_tokenizer,
)
from zerotrain.models.families.small_pipeline import SmallPipeline, SmallSpec

HEADS = {"nano": 4, "micro": 10}
HEAD_WIDTH = 32
LAYERS = {"nano": 4, "micro": 6}
"""The transformers have 2.3 and 21.5 million parameters."""


def train_tokenizers(captions: Sequence[str], pipeline: str) -> dict[str, Any]:
    """Train the tokenizer of both CLIP encoders, and that of T5."""
    clip, t5 = train_tokenizer(captions), train_t5_tokenizer(captions)
    return {"tokenizer": clip, "tokenizer_2": clip, "tokenizer_3": t5}


def build_models(spec: SmallSpec) -> dict[str, Any]:
    """Build the text encoders and the transformer."""
    clip = text_config(spec.tokenizers["tokenizer"], spec.width)
    return {
        "text_encoder": CLIPTextModelWithProjection(clip),
        "text_encoder_2": CLIPTextModelWithProjection(clip),
        "text_encoder_3": T5EncoderModel(t5_config(spec.tokenizers["tokenizer_3"], spec.width)),
        "transformer": build_transformer(spec.side, spec.channels, spec.preset, spec.longest),
    }


def build_transformer(
    side: int, channels: int = 4, preset: str = "nano", longest: int | None = None
) -> Any:
    """Build a small transformer of SD3 for squares, or for images with a longest side."""
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
        # SD3 has positions for images three times as large, a third of a step apart, with which so
        # small a model learns slowly.
        pos_embed_max_size=(longest or side) // PIXELS_PER_LATENT,
    )


SMALL = SmallPipeline(
    "StableDiffusion3Pipeline", train_tokenizers, build_models, FlowMatchEulerDiscreteScheduler
)
