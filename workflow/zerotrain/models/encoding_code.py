"""The code that turns samples into cached tensors, by family; after an edit, caches are compared.

A family declares the same in `encoding_code` and `prompt_code`, but reading these needs torch.
Names are those of modules, or `module:Class` for one class of a module. For a family that is not
listed here, its whole module counts.
"""

from __future__ import annotations

FAMILIES = "zerotrain.models.families."
PIPELINES = f"{FAMILIES}pipelines"
PROMPTS = f"{FAMILIES}prompt_tokens"
CROP = "zerotrain.data.crop"
BUCKETS = "zerotrain.data.buckets"

ENCODING: dict[str, tuple[str, ...]] = {
    "sdxl": (f"{FAMILIES}sdxl:SdxlEncoders", PIPELINES, PROMPTS, f"{FAMILIES}chunks"),
    "sd3": (f"{FAMILIES}sd3:Sd3Encoders", PIPELINES, PROMPTS),
    "flux": (
        f"{FAMILIES}flux:FluxEncoders",
        f"{FAMILIES}flux_conditioning",
        f"{FAMILIES}flux_redux",
        PIPELINES,
        PROMPTS,
    ),
    "qwen_image": (
        f"{FAMILIES}qwen_image:QwenEncoders",
        f"{FAMILIES}qwen_image_encoding",
        PIPELINES,
        PROMPTS,
    ),
    "causal_lm": (f"{FAMILIES}tokens",),
    "seq2seq_lm": (f"{FAMILIES}tokens",),
}

PIXELS = ("zerotrain.data.digits", "zerotrain.data.decode", CROP, BUCKETS)
"""Modules that read the pixels of the built-in digits, and of a folder of images."""

BATCHES = ("zerotrain.cache.batching", "zerotrain.cache.encoding", "zerotrain.cache.precision")
"""Modules that batch and round in every cache of images."""

MASKS = ("zerotrain.data.masks", "zerotrain.data.transparency", "zerotrain.cache.mask_scaling")
"""Modules that scale loss masks; a cache without masks does not depend on them."""


def encoding_code(family: str, *, masks: bool = False) -> tuple[str, ...]:
    """List the declared code of a family, as `zerotrain.artifact.sources.code_digest` takes it.

    Args:
        family: Name of the family.
        masks: Whether the dataset has loss masks.
    """
    text = family in ("causal_lm", "seq2seq_lm")
    own = ENCODING.get(family, (f"{FAMILIES}{family}", PIPELINES))
    images = () if text else (*PIXELS, *BATCHES, *(MASKS if masks else ()))
    return own + images
