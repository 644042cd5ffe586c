"""A small Qwen-Image of the real classes, built from a seed: the presets `nano` and `micro`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImageTransformer2DModel,
)
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from zerotrain.artifact import write_json
from zerotrain.artifact.documents import parse_json
from zerotrain.models.base import MODEL_INDEX
from zerotrain.models.families.nano import TEXT_WIDTH, VOCABULARY
from zerotrain.models.families.pipelines import pipeline_class
from zerotrain.models.families.qwen_image_encoding import EDIT, EDIT_PLUS, PLAIN, PROCESSOR
from zerotrain.models.families.small_pipeline import SmallPipeline, SmallSpec
from zerotrain.models.pretrained import read_config

END, START, PADDING = "<|im_end|>", "<|im_start|>", "<|endoftext|>"
VISION_TOKENS = {
    "vision_start_token_id": "<|vision_start|>",
    "image_token_id": "<|image_pad|>",
    "vision_end_token_id": "<|vision_end|>",
}
"""Tokens before an image in a prompt, in place of each of its tokens, and after it, by their names
in the text encoder's configuration."""
LATENT_CHANNELS = 4
HEADS = {"nano": 4, "micro": 10}
LAYERS = {"nano": 3, "micro": 5}
"""The transformers have 1.9 and 18.9 million parameters."""
TEXT_INITIALIZER_RANGE = 0.2
"""Larger than Qwen's 0.02, so that an untrained encoder mixes a word into those that follow it."""
UNUSED_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_heads": 1,
    "patch_size": 2,
    "window_size": 8,
    "fullatt_block_indexes": [0],
}
VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "window_size": 16,
    "fullatt_block_indexes": [1],
    "initializer_range": TEXT_INITIALIZER_RANGE,
}
"""A block with windows of 2 x 2 tokens, each of 8 x 8 pixels, and one without."""
VISION_PIXELS = {"shortest_edge": 8 * 8, "longest_edge": 32 * 32}
"""Area of an image as the text encoder sees it: at most 16 tokens."""


def train_tokenizers(captions: Sequence[str], pipeline: str) -> dict[str, Any]:
    """Train the tokenizer on the pipeline's template and the captions."""
    kind = pipeline_class(pipeline)
    empty = kind(*[None] * len(inspect.signature(kind).parameters))
    template = empty.prompt_template_encode
    special = () if pipeline == PLAIN else tuple(VISION_TOKENS.values())
    tokenizer = train_tokenizer(captions, template, special)
    before = tokenizer(re.split(r"\{\}|<\|vision_start", template)[0]).input_ids
    if len(before) != empty.prompt_template_encode_start_idx:
        raise AssertionError(f"{len(before)} tokens precede a prompt; the pipeline drops others")
    return {"tokenizer": tokenizer}


def train_tokenizer(captions: Sequence[str], template: str, special: Sequence[str] = ()) -> Any:
    """Train a Qwen2 tokenizer (byte-level BPE) on template and captions.

    The template's words become single tokens, as in Qwen's own tokenizer: the pipeline drops as
    many tokens as precede the prompt there. `special` has further special tokens.
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
    model = parse_json(trained.to_str(), "the tokenizer")["model"]
    return Qwen2Tokenizer(
        vocab=model["vocab"],
        merges=[tuple(pair) for pair in model["merges"]],
        eos_token=END,
        pad_token=PADDING,
        unk_token=PADDING,
        extra_special_tokens=[START, *special],
    )


def build_models(spec: SmallSpec) -> dict[str, Any]:
    """Build the text encoder, which sees images in pipelines for editing, and the transformer."""
    tokenizer, vision_tokens = spec.tokenizers["tokenizer"], None
    if spec.pipeline != PLAIN:
        vision_tokens = {
            name: tokenizer.convert_tokens_to_ids(token) for name, token in VISION_TOKENS.items()
        }
    text = text_config(tokenizer, spec.width, vision_tokens)
    return {
        "text_encoder": Qwen2_5_VLForConditionalGeneration(text),
        "transformer": build_transformer(spec.channels, spec.preset),
    }


def text_config(tokenizer: Any, width: int, vision_tokens: Mapping[str, int] | None = None) -> Any:
    """Return the text encoder's configuration; an unused vision part is a single small layer.

    Args:
        tokenizer: Its tokenizer.
        width: Width of its embeddings.
        vision_tokens: The tokens of images by their names in its configuration, if it sees them.
    """
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
        vision_config=UNUSED_VISION | {"out_hidden_size": width}
        if vision_tokens is None
        else VISION | {"out_hidden_size": width},
        tie_word_embeddings=True,
        **(vision_tokens or {}),
    )


def build_autoencoder(side: int) -> Any:
    """Build an autoencoder that turns 4 x 4 pixels into one latent, for images of any side."""
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


def add_processor(spec: SmallSpec, out: Path) -> None:
    """Add a processor to a plain model, in the same files as in the hub's bases.

    Saving it as a whole needs torchvision, for the part that reads videos.
    """
    Qwen2VLImageProcessorPil(
        size=VISION_PIXELS,
        patch_size=VISION["patch_size"],
        merge_size=VISION["spatial_merge_size"],
    ).save_pretrained(out / PROCESSOR)
    spec.tokenizers["tokenizer"].save_pretrained(out / PROCESSOR)
    index = read_config(out / MODEL_INDEX)
    index |= {"_class_name": spec.pipeline, PROCESSOR: ["transformers", "Qwen2VLProcessor"]}
    write_json(out / MODEL_INDEX, index)


def build_transformer(latent_channels: int, preset: str = "nano") -> Any:
    """Build a small transformer of Qwen-Image."""
    return QwenImageTransformer2DModel(
        in_channels=4 * latent_channels,
        out_channels=latent_channels,
        num_layers=LAYERS[preset],
        attention_head_dim=32,
        num_attention_heads=HEADS[preset],
        joint_attention_dim=TEXT_WIDTH[preset],
        axes_dims_rope=(8, 12, 12),
    )


SMALL = SmallPipeline(
    PLAIN,
    train_tokenizers,
    build_models,
    partial(FlowMatchEulerDiscreteScheduler, use_dynamic_shifting=True),
    build_autoencoder,
    "AutoencoderKLQwenImage",
    lambda mean, std: {
        "latents_mean": [mean] * LATENT_CHANNELS,
        "latents_std": [std] * LATENT_CHANNELS,
    },
    frames=True,
    add_parts=add_processor,
    extended=(EDIT, EDIT_PLUS),
)
