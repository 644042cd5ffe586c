"""The table of Qwen-Image's small models: the presets `nano` and `micro`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zerotrain.artifact import write_json
from zerotrain.models.base import MODEL_INDEX
from zerotrain.models.families.small_models import Arguments, SmallPipeline, SmallSpec
from zerotrain.models.pretrained import read_config

VISION_TOKENS = {
    "vision_start_token_id": "<|vision_start|>",
    "image_token_id": "<|image_pad|>",
    "vision_end_token_id": "<|vision_end|>",
}
"""Tokens before an image in a prompt, in place of each of its tokens, and after it, by their names
in the text encoder's configuration."""
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


def small_parts(spec: SmallSpec) -> dict[str, Arguments]:
    """Return the arguments of the text encoder, which sees images in pipelines for editing, and of
    the transformer. An unused vision part is a single small layer."""
    tokenizer, width = spec.tokenizers["tokenizer"], spec.width
    edits = spec.pipeline in SMALL.extended
    return {
        "text_encoder": {
            "text_config": {
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
            "vision_config": (VISION if edits else UNUSED_VISION) | {"out_hidden_size": width},
            "tie_word_embeddings": True,
            **{
                name: tokenizer.convert_tokens_to_ids(token)
                for name, token in VISION_TOKENS.items()
                if edits
            },
        },
        "transformer": {
            "in_channels": 4 * spec.channels,
            "out_channels": spec.channels,
            "num_layers": LAYERS[spec.preset],
            "attention_head_dim": 32,
            "num_attention_heads": HEADS[spec.preset],
            "joint_attention_dim": width,
            "axes_dims_rope": (8, 12, 12),
        },
    }


def add_processor(spec: SmallSpec, out: Path) -> None:
    """Add a processor to a plain model, in the same files as in the hub's bases.

    Saving it as a whole needs torchvision, for the part that reads videos.
    """
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    Qwen2VLImageProcessorPil(
        size=VISION_PIXELS,
        patch_size=VISION["patch_size"],
        merge_size=VISION["spatial_merge_size"],
    ).save_pretrained(out / "processor")
    spec.tokenizers["tokenizer"].save_pretrained(out / "processor")
    index = read_config(out / MODEL_INDEX)
    index |= {"_class_name": spec.pipeline, "processor": ["transformers", "Qwen2VLProcessor"]}
    write_json(out / MODEL_INDEX, index)


SMALL = SmallPipeline(
    tokenizers={"tokenizer": "qwen2"},
    parts=small_parts,
    scheduler="FlowMatchEulerDiscreteScheduler",
    schedule={"use_dynamic_shifting": True},
    add_parts=add_processor,
    extended=("QwenImageEditPipeline", "QwenImageEditPlusPipeline"),
)
