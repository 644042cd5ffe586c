"""A small Qwen-Image of the real classes, built from a seed: the presets `nano` and `micro`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImageTransformer2DModel,
)
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from zerotrain.families.identity import identity_autoencoder
from zerotrain.families.nano import TEXT_WIDTH, VOCABULARY, fit_autoencoder
from zerotrain.families.pipelines import pipeline_class

if TYPE_CHECKING:
    from PIL.Image import Image

END, START, PADDING = "<|im_end|>", "<|im_start|>", "<|endoftext|>"
LATENT_CHANNELS = 4
HEADS = {"nano": 4, "micro": 10}
LAYERS = {"nano": 3, "micro": 5}
"""Transformers of 1.9 and 18.9 million parameters."""
TEXT_INITIALIZER_RANGE = 0.2
"""Larger than Qwen's 0.02: an untrained encoder then mixes a word into those that follow it."""


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
        empty = pipeline_class("QwenImagePipeline")(None, None, None, None, None)
        tokenizer = train_tokenizer(captions, empty.prompt_template_encode)
        tokenizers = {"tokenizer": tokenizer}
        before = tokenizer(empty.prompt_template_encode.split("{}")[0]).input_ids
        if len(before) != empty.prompt_template_encode_start_idx:
            raise AssertionError(
                f"{len(before)} tokens precede a prompt; the pipeline drops others"
            )
        if identity:
            autoencoder = identity_autoencoder("AutoencoderKLQwenImage")
        else:
            autoencoder = build_autoencoder(images[0].width)
            mean, std = fit_autoencoder(autoencoder, images, seed, frames=True)
            autoencoder.register_to_config(
                latents_mean=[mean] * LATENT_CHANNELS, latents_std=[std] * LATENT_CHANNELS
            )
        pipeline = pipeline_class("QwenImagePipeline")(
            vae=autoencoder,
            **build_models(preset, tokenizers, images[0].width, autoencoder.config.z_dim),
            **tokenizers,
            scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        )
    pipeline.save_pretrained(out)


def train_tokenizer(captions: Sequence[str], template: str) -> Any:
    """A Qwen2 tokenizer (byte-level BPE) whose merges come from template and captions.

    The template's words are single tokens, as they are in Qwen's own: the pipeline drops as many
    tokens as precede the prompt there.
    """
    own = Qwen2Tokenizer().backend_tokenizer
    trained = Tokenizer(models.BPE())
    trained.normalizer, trained.pre_tokenizer = own.normalizer, own.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = (part for c in captions for part in re.split(r"<\|\w+\|>", template.format(c)))
    trained.train_from_iterator(texts, trainer)
    model = json.loads(trained.to_str())["model"]
    return Qwen2Tokenizer(
        vocab=model["vocab"],
        merges=[tuple(pair) for pair in model["merges"]],
        eos_token=END,
        pad_token=PADDING,
        unk_token=PADDING,
        extra_special_tokens=[START],
    )


def build_models(
    preset: str, tokenizers: Mapping[str, Any], side: int, channels: int
) -> dict[str, Any]:
    """The models beside the autoencoder, for latents of these channels and any side."""
    text = text_config(tokenizers["tokenizer"], TEXT_WIDTH[preset])
    return {
        "text_encoder": Qwen2_5_VLForConditionalGeneration(text),
        "transformer": build_transformer(channels, preset),
    }


def text_config(tokenizer: Any, width: int) -> Any:
    """The configuration of the text encoder; its eyes, which nothing here uses, are one layer."""
    return Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_hidden_layers": 2,
            "num_attention_heads": width // 16,
            "num_key_value_heads": width // 32,
            "initializer_range": TEXT_INITIALIZER_RANGE,
            "bos_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": [2, 3, 3],
            },
        },
        vision_config={
            "depth": 1,
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_heads": 1,
            "out_hidden_size": width,
            "patch_size": 2,
            "window_size": 8,
            "fullatt_block_indexes": [0],
        },
        tie_word_embeddings=True,
    )


def build_autoencoder(side: int) -> Any:
    """An autoencoder that turns 4 x 4 pixels into one latent, of images of any side."""
    del side
    return AutoencoderKLQwenImage(
        base_dim=16,
        z_dim=LATENT_CHANNELS,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, False],
        latents_mean=[0.0] * LATENT_CHANNELS,
        latents_std=[1.0] * LATENT_CHANNELS,
    )


def build_transformer(latent_channels: int, preset: str = "nano") -> Any:
    """Qwen-Image's transformer in small."""
    return QwenImageTransformer2DModel(
        in_channels=4 * latent_channels,
        out_channels=latent_channels,
        num_layers=LAYERS[preset],
        attention_head_dim=32,
        num_attention_heads=HEADS[preset],
        joint_attention_dim=TEXT_WIDTH[preset],
        axes_dims_rope=(8, 12, 12),
    )
