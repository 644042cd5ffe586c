"""The folders of a base of each family, and the classes in them; without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from zerotrain.config.families import ROOT

MODEL_INDEX = "model_index.json"


@dataclass(frozen=True)
class BaseLayout:
    """The folders of a base model, in diffusers' or transformers' layout.

    Attributes:
        name: The family.
        trained_part: The part that training changes.
        parts: Sub-folders; only ROOT in transformers' layout.
        classes: The class of each part with weights.
        optional_parts: Those of `parts` that a base may lack, all of them together.
        extra_parts: Further sub-folders of some bases, with their classes; model_index.json does
            not name them. A base that has the first of them has all.
    """

    name: str
    trained_part: str
    parts: tuple[str, ...]
    classes: Mapping[str, str]
    optional_parts: tuple[str, ...] = ()
    extra_parts: Mapping[str, str] = field(default_factory=dict)


_TWO_ENCODERS = ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")
_SD3_T5 = ("text_encoder_3", "tokenizer_3")

LAYOUTS = {
    layout.name: layout
    for layout in (
        BaseLayout(
            "sdxl",
            "unet",
            ("scheduler", *_TWO_ENCODERS, "unet", "vae"),
            {
                "text_encoder": "CLIPTextModel",
                "text_encoder_2": "CLIPTextModelWithProjection",
                "unet": "UNet2DConditionModel",
                "vae": "AutoencoderKL",
            },
        ),
        BaseLayout(
            "sd3",
            "transformer",
            ("scheduler", *_TWO_ENCODERS, *_SD3_T5, "transformer", "vae"),
            {
                "text_encoder": "CLIPTextModelWithProjection",
                "text_encoder_2": "CLIPTextModelWithProjection",
                "text_encoder_3": "T5EncoderModel",
                "transformer": "SD3Transformer2DModel",
                "vae": "AutoencoderKL",
            },
            _SD3_T5,
        ),
        BaseLayout(
            "qwen_image",
            "transformer",
            ("processor", "scheduler", "text_encoder", "tokenizer", "transformer", "vae"),
            {
                "text_encoder": "Qwen2_5_VLForConditionalGeneration",
                "transformer": "QwenImageTransformer2DModel",
                "vae": "AutoencoderKLQwenImage",
            },
            ("processor",),
        ),
        BaseLayout(
            "flux",
            "transformer",
            ("scheduler", *_TWO_ENCODERS, "transformer", "vae"),
            {
                "text_encoder": "CLIPTextModel",
                "text_encoder_2": "T5EncoderModel",
                "transformer": "FluxTransformer2DModel",
                "vae": "AutoencoderKL",
            },
            extra_parts={
                "image_embedder": "ReduxImageEncoder",
                "image_encoder": "SiglipVisionModel",
            },
        ),
        BaseLayout("causal_lm", ROOT, (ROOT,), {ROOT: "AutoModelForCausalLM"}),
        BaseLayout("seq2seq_lm", ROOT, (ROOT,), {ROOT: "AutoModelForSeq2SeqLM"}),
    )
}
