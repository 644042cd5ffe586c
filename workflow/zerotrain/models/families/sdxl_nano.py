"""A small SDXL of the real classes, built from a seed: the presets `nano` and `micro`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diffusers import DDIMScheduler, UNet2DConditionModel
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from zerotrain.models.families.nano import (
    PIXELS_PER_LATENT,
    TEXT_WIDTH,
    text_config,
    train_tokenizer,
)
from zerotrain.models.families.small_pipeline import SmallPipeline, SmallSpec

UNET = {
    "nano": {"block_out_channels": (32, 96), "attention_head_dim": (2, 4)},
    "micro": {"block_out_channels": (96, 320), "attention_head_dim": (3, 10)},
}
"""U-Nets of 2.1 and 22.1 million parameters; attention_head_dim are numbers of heads."""
TEXT_WIDTHS = {"nano": (48, 80), "micro": (96, 160)}
"""Widths of the two encoders, by which readers of the original layout distinguish them."""
SIZE_WIDTH = 32
"""Width of the embedding of each of the six size numbers."""


def train_tokenizers(captions: Sequence[str], pipeline: str) -> dict[str, Any]:
    """Train the tokenizer of both text encoders."""
    return dict.fromkeys(("tokenizer", "tokenizer_2"), train_tokenizer(captions))


def build_models(spec: SmallSpec) -> dict[str, Any]:
    """Build the text encoders and the U-Net."""
    first, second = TEXT_WIDTHS[spec.preset]
    clip, clip_2 = spec.tokenizers["tokenizer"], spec.tokenizers["tokenizer_2"]
    return {
        "text_encoder": CLIPTextModel(text_config(clip, first, spec.width)),
        "text_encoder_2": CLIPTextModelWithProjection(text_config(clip_2, second, spec.width)),
        "unet": build_unet(spec.side, spec.channels, spec.preset),
    }


def build_unet(side: int, channels: int = 4, preset: str = "nano") -> Any:
    """Build a small U-Net of SDXL: a block of convolutions, then one with attention."""
    return UNet2DConditionModel(
        sample_size=side // PIXELS_PER_LATENT,
        in_channels=channels,
        out_channels=channels,
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 1),
        cross_attention_dim=sum(TEXT_WIDTHS[preset]),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=SIZE_WIDTH,
        projection_class_embeddings_input_dim=TEXT_WIDTH[preset] + 6 * SIZE_WIDTH,
        norm_num_groups=16,
        **UNET[preset],
    )


def build_scheduler() -> Any:
    """Build SDXL's noise schedule, with DDIM as the pipeline's sampler."""
    return DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
        prediction_type="v_prediction",
        timestep_spacing="trailing",
    )


SMALL = SmallPipeline(
    "StableDiffusionXLPipeline",
    train_tokenizers,
    build_models,
    build_scheduler,
    scaling=lambda mean, std: {"scaling_factor": 1 / std},
    arguments={"add_watermarker": False},
)
