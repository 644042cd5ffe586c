"""A small SDXL of the real classes, built from a seed: the preset `nano`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from diffusers import DDIMScheduler, UNet2DConditionModel
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from zerotrain.families.nano import (
    PIXELS_PER_LATENT,
    POOLED_WIDTH,
    TEXT_WIDTH,
    build_autoencoder,
    fit_autoencoder,
    text_config,
    train_tokenizer,
)
from zerotrain.families.pipelines import pipeline_class

if TYPE_CHECKING:
    from PIL.Image import Image

SIZE_WIDTH = 32
"""Width of the embedding of each of the six size numbers."""


def build_nano(captions: Sequence[str], images: Sequence[Image], seed: int, out: Path) -> None:
    """Write the model into `out` in diffusers' layout; equal arguments give equal files."""
    side = images[0].width
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = train_tokenizer(captions)
        autoencoder = build_autoencoder(side)
        _, latent_std = fit_autoencoder(autoencoder, images, seed)
        autoencoder.register_to_config(scaling_factor=1 / latent_std)
        pipeline = pipeline_class("StableDiffusionXLPipeline")(
            vae=autoencoder,
            text_encoder=CLIPTextModel(text_config(tokenizer)),
            text_encoder_2=CLIPTextModelWithProjection(text_config(tokenizer)),
            tokenizer=tokenizer,
            tokenizer_2=tokenizer,
            unet=build_unet(side),
            scheduler=noise_scheduler(),
            add_watermarker=False,
        )
    pipeline.save_pretrained(out)


def build_unet(side: int) -> Any:
    """SDXL's U-Net in small: a block of convolutions, then one with attention."""
    return UNet2DConditionModel(
        sample_size=side // PIXELS_PER_LATENT,
        block_out_channels=(32, 96),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 1),
        attention_head_dim=(2, 4),
        cross_attention_dim=2 * TEXT_WIDTH,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=SIZE_WIDTH,
        projection_class_embeddings_input_dim=POOLED_WIDTH + 6 * SIZE_WIDTH,
        norm_num_groups=16,
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
