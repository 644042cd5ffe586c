"""The parts of the nano models, as the families build them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from zerotrain.families import (
    causal_lm_nano,
    flux_nano,
    language_nano,
    nano,
    qwen_image_nano,
    sd3_nano,
    sdxl_nano,
    seq2seq_lm_nano,
)
from zerotrain.plan.architecture import Part

SIDE = 256
"""Pixels. It is recorded in the configuration and changes no parameter; SD3 has positions for no
larger images."""
BYTES = 256


class _Vocabulary:
    """As many tokens as a nano tokenizer can have: each byte at a word's end and within, merges."""

    bos_token_id = eos_token_id = pad_token_id = 0

    def __len__(self) -> int:
        return nano.VOCABULARY + BYTES + 2


def sdxl_parts() -> dict[str, Part]:
    """Autoencoder, text encoders (at their largest vocabulary) and U-Net."""
    text = nano.text_config(_Vocabulary()).to_dict()
    with torch.device("meta"):
        unet = sdxl_nano.build_unet(SIDE)
        autoencoder = nano.build_autoencoder(SIDE)
    return {
        "text_encoder": Part("transformers", "CLIPTextModel", text),
        "text_encoder_2": Part("transformers", "CLIPTextModelWithProjection", text),
        "unet": Part("diffusers", "UNet2DConditionModel", dict(unet.config)),
        "vae": Part("diffusers", "AutoencoderKL", dict(autoencoder.config)),
    }


def sd3_parts() -> dict[str, Part]:
    """Autoencoder, text encoders (at their largest vocabulary) and transformer."""
    text = nano.text_config(_Vocabulary()).to_dict()
    with torch.device("meta"):
        transformer = sd3_nano.build_transformer(SIDE)
        autoencoder = nano.build_autoencoder(SIDE)
    return {
        "text_encoder": Part("transformers", "CLIPTextModelWithProjection", text),
        "text_encoder_2": Part("transformers", "CLIPTextModelWithProjection", text),
        "text_encoder_3": Part(
            "transformers", "T5EncoderModel", nano.t5_config(_Vocabulary()).to_dict()
        ),
        "transformer": Part("diffusers", "SD3Transformer2DModel", dict(transformer.config)),
        "vae": Part("diffusers", "AutoencoderKL", dict(autoencoder.config)),
    }


def flux_parts() -> dict[str, Part]:
    """Autoencoder, text encoders (at their largest vocabulary) and transformer."""
    text = nano.text_config(_Vocabulary()).to_dict()
    with torch.device("meta"):
        autoencoder = nano.build_autoencoder(SIDE)
        transformer = flux_nano.build_transformer(autoencoder.config.latent_channels)
    return {
        "text_encoder": Part("transformers", "CLIPTextModel", text),
        "text_encoder_2": Part(
            "transformers", "T5EncoderModel", nano.t5_config(_Vocabulary()).to_dict()
        ),
        "transformer": Part("diffusers", "FluxTransformer2DModel", dict(transformer.config)),
        "vae": Part("diffusers", "AutoencoderKL", dict(autoencoder.config)),
    }


def qwen_image_parts() -> dict[str, Part]:
    """Autoencoder, text encoder (at its largest vocabulary) and transformer."""
    text = qwen_image_nano.text_config(_Vocabulary()).to_dict()
    with torch.device("meta"):
        autoencoder = qwen_image_nano.build_autoencoder()
        transformer = qwen_image_nano.build_transformer(autoencoder.config.z_dim)
    return {
        "text_encoder": Part("transformers", "Qwen2_5_VLForConditionalGeneration", text),
        "transformer": Part("diffusers", "QwenImageTransformer2DModel", dict(transformer.config)),
        "vae": Part("diffusers", "AutoencoderKLQwenImage", dict(autoencoder.config)),
    }


def causal_lm_parts() -> dict[str, Part]:
    """The language model, at its largest vocabulary."""
    values = causal_lm_nano.nano_config(language_nano.VOCABULARY, _Vocabulary()).to_dict()
    return {"model": Part("transformers", "Qwen2ForCausalLM", values)}


def seq2seq_lm_parts() -> dict[str, Part]:
    """The language model, at its largest vocabulary."""
    values = seq2seq_lm_nano.nano_config(language_nano.VOCABULARY, _Vocabulary()).to_dict()
    return {"model": Part("transformers", "T5ForConditionalGeneration", values)}


PARTS: Mapping[str, Callable[[], dict[str, Part]]] = {
    "sdxl": sdxl_parts,
    "sd3": sd3_parts,
    "flux": flux_parts,
    "qwen_image": qwen_image_parts,
    "causal_lm": causal_lm_parts,
    "seq2seq_lm": seq2seq_lm_parts,
}
"""Of each family that has the preset."""
