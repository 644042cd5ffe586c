"""The model families by name, and what is asked of one before torch is imported."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Literal

PRESETS = ("nano", "micro")
"""Small models of the real classes that `base` may name; `micro` has ten times the parameters."""
LOSS = ("loss_type", "huber_c", "huber_schedule")
DENOISING = ("snr_gamma", "noise_offset", *LOSS)
FLOW_MATCHING = ("weighting_scheme", "logit_mean", "logit_std", "mode_scale", "flow_shift", *LOSS)
SD3 = (*FLOW_MATCHING, "precondition_outputs")
CONDITIONS = ("flux_guidance_value",)
"""Keys of config.objective that the model receives; the others say how it is trained."""


@dataclass(frozen=True)
class Kind:
    """What is asked of a family before its module, and torch with it, is imported.

    Attributes:
        modality: What it makes.
        trained_part: The part that training changes; of a language model `model`.
        objective: Keys of config.objective that mean something to it.
        pixels: Whether its presets can take pixels as latents (vae: identity).
        text_length: Whether its text encoders take captions of any length (max_sequence_length).
        chunks: Whether captions of any length can be encoded in chunks (long_captions).
        conditioning: Whether samples may have conditioning images (data.conditioning_images).
        noise_schedule: Whether prediction_type, zero terminal SNR and the sampler can be chosen.
        weighting_scheme: Of flow matching, where nothing else is set.
        token_routing: Whether tokens can pass layers by (tread_config).
        no_gradient: Regular expression of parameters that no loss depends on, as the model is made.
    """

    modality: Literal["image", "text"]
    trained_part: str
    objective: tuple[str, ...] = ()
    _: KW_ONLY
    pixels: bool = False
    text_length: bool = False
    chunks: bool = False
    conditioning: bool = False
    noise_schedule: bool = False
    weighting_scheme: str = "none"
    token_routing: bool = False
    no_gradient: str = ""


FAMILIES: dict[str, Kind] = {
    "sdxl": Kind("image", "unet", DENOISING, chunks=True, noise_schedule=True),
    "sd3": Kind(
        "image",
        "transformer",
        SD3,
        text_length=True,
        weighting_scheme="logit_normal",
        token_routing=True,
    ),
    "qwen_image": Kind(
        "image",
        "transformer",
        FLOW_MATCHING,
        pixels=True,
        text_length=True,
        conditioning=True,
        no_gradient=r"transformer_blocks\.\d+\.(attn\.to_add_out|txt_mlp)\.",
    ),
    "flux": Kind(
        "image",
        "transformer",
        (*FLOW_MATCHING, *CONDITIONS),
        pixels=True,
        text_length=True,
        conditioning=True,
        token_routing=True,
    ),
    "causal_lm": Kind("text", "model"),
    "seq2seq_lm": Kind("text", "model"),
}
"""Those that a configuration may name."""
LANGUAGE_MODELS = tuple(name for name, kind in FAMILIES.items() if kind.modality == "text")
"""Those of text; the others are of images."""
ROOT = "."
"""The trained part of a model whose files are in its folder itself, as transformers has them."""
