"""A small SDXL of the real classes, built from a seed: the presets `nano` and `micro`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from diffusers import DDIMScheduler, UNet2DConditionModel
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from zerotrain.families.nano import (
    PIXELS_PER_LATENT,
    TEXT_WIDTH,
    build_autoencoder,
    fit_autoencoder,
    text_config,
    train_tokenizer,
)
from zerotrain.families.pipelines import pipeline_class

if TYPE_CHECKING:
    from PIL.Image import Image

UNET = {
    "nano": {"block_out_channels": (32, 96), "attention_head_dim": (2, 4)},
    "micro": {"block_out_channels": (96, 320), "attention_head_dim": (3, 10)},
}
"""2.1 and 22.1 million parameters; the second row are numbers of heads."""
TEXT_WIDTHS = {"nano": (48, 80), "micro": (96, 160)}
"""Of the two encoders; readers of the original layout tell them apart by it."""
SIZE_WIDTH = 32
"""Width of the embedding of each of the six size numbers."""


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
        clip = train_tokenizer(captions)
        tokenizers = {"tokenizer": clip, "tokenizer_2": clip}
        autoencoder = build_autoencoder(side)
        _, latent_std = fit_autoencoder(autoencoder, images, seed)
        autoencoder.register_to_config(scaling_factor=1 / latent_std)
        pipeline = pipeline_class("StableDiffusionXLPipeline")(
            vae=autoencoder,
            **build_models(preset, tokenizers, side, autoencoder.config.latent_channels),
            **tokenizers,
            scheduler=noise_scheduler(),
            add_watermarker=False,
        )
    pipeline.save_pretrained(out)


def build_models(
    preset: str, tokenizers: Mapping[str, Any], side: int, channels: int
) -> dict[str, Any]:
    """The models beside the autoencoder, for images of this side and latents of these channels."""
    (first, second), pooled = TEXT_WIDTHS[preset], TEXT_WIDTH[preset]
    return {
        "text_encoder": CLIPTextModel(text_config(tokenizers["tokenizer"], first, pooled)),
        "text_encoder_2": CLIPTextModelWithProjection(
            text_config(tokenizers["tokenizer_2"], second, pooled)
        ),
        "unet": build_unet(side, channels, preset),
    }


def build_unet(side: int, channels: int = 4, preset: str = "nano") -> Any:
    """SDXL's U-Net in small: a block of convolutions, then one with attention."""
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


def noise_scheduler() -> Any:
    """SDXL's noise schedule; DDIM as the pipeline's sampler."""
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
