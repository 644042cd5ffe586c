"""The parts of the nano models, as their families build them."""

from __future__ import annotations

import torch

from zerotrain.families import causal_lm_nano, language_nano, nano, sdxl_nano, seq2seq_lm_nano
from zerotrain.plan.architecture import Part

SIDE = 16
"""Pixels. It is recorded in the configuration and changes no tensor."""
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


def language_parts(family: str) -> dict[str, Part]:
    """The language model of a family, at its largest vocabulary."""
    made = {
        "causal_lm": ("Qwen2ForCausalLM", causal_lm_nano.nano_config),
        "seq2seq_lm": ("T5ForConditionalGeneration", seq2seq_lm_nano.nano_config),
    }
    name, config = made[family]
    values = config(language_nano.VOCABULARY, _Vocabulary()).to_dict()
    return {"model": Part("transformers", name, values)}
