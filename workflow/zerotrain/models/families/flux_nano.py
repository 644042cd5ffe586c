"""A small Flux of the real classes, built from a seed: the presets `nano` and `micro`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel
from transformers import CLIPTextModel, SiglipVisionConfig, SiglipVisionModel, T5EncoderModel

from zerotrain.models.families.conditioning import IMAGE_EMBEDDER, IMAGE_ENCODER, REDUX
from zerotrain.models.families.flux_conditioning import FILL_PIPELINE
from zerotrain.models.families.nano import (
    PIXELS_PER_LATENT,
    TEXT_WIDTH,
    t5_config,
    text_config,
    train_t5_tokenizer,
    train_tokenizer,
)
from zerotrain.models.families.pipelines import pipeline_class
from zerotrain.models.families.small_pipeline import SmallPipeline, SmallSpec

HEADS = {"nano": 4, "micro": 10}
LAYERS = {"nano": 2, "micro": 3}
"""Double-stream layers, and as many single-stream ones: 1.8 and 16.3 million parameters."""


def train_tokenizers(captions: Sequence[str], pipeline: str) -> dict[str, Any]:
    """Train the tokenizers of CLIP and T5."""
    return {"tokenizer": train_tokenizer(captions), "tokenizer_2": train_t5_tokenizer(captions)}


def build_models(spec: SmallSpec) -> dict[str, Any]:
    """Build the text encoders and the transformer.

    The transformer of FLUX.1 Fill takes a latent of the masked image and the mask's pixels next to
    each noisy latent.
    """
    models = {
        "text_encoder": CLIPTextModel(text_config(spec.tokenizers["tokenizer"], spec.width)),
        "text_encoder_2": T5EncoderModel(t5_config(spec.tokenizers["tokenizer_2"], spec.width)),
        "transformer": build_transformer(spec.channels, spec.preset),
    }
    if spec.pipeline == FILL_PIPELINE:
        further = spec.channels + PIXELS_PER_LATENT**2
        models["transformer"] = build_transformer(spec.channels, spec.preset, further=further)
    return models


def add_redux(spec: SmallSpec, out: Path) -> None:
    """Add small image encoders of FLUX.1 Redux to a folder: four tokens for 32 x 32 pixels."""
    vision = SiglipVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=32,
        patch_size=16,
    )
    SiglipVisionModel(vision).save_pretrained(out / IMAGE_ENCODER)
    embedder = pipeline_class("ReduxImageEncoder")(vision.hidden_size, 2 * spec.width)
    embedder.save_pretrained(out / IMAGE_EMBEDDER)


def build_transformer(latent_channels: int, preset: str = "nano", *, further: int = 0) -> Any:
    """Build a small transformer of Flux, which may take further channels; it takes no guidance."""
    return FluxTransformer2DModel(
        in_channels=4 * (latent_channels + further),
        out_channels=4 * latent_channels if further else None,
        num_layers=LAYERS[preset],
        num_single_layers=LAYERS[preset],
        attention_head_dim=32,
        num_attention_heads=HEADS[preset],
        axes_dims_rope=(8, 12, 12),
        joint_attention_dim=2 * TEXT_WIDTH[preset],
        pooled_projection_dim=TEXT_WIDTH[preset],
        guidance_embeds=False,
    )


SMALL = SmallPipeline(
    "FluxPipeline",
    train_tokenizers,
    build_models,
    partial(FlowMatchEulerDiscreteScheduler, use_dynamic_shifting=True),
    add_parts=add_redux,
    extended=(REDUX,),
)
