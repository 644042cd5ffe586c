"""Conditioning images in Qwen-Image's transformer: tokens after those of the image.

diffusers' editing pipelines append them, and so does DiffSynth-Studio's in-context control
(QwenImageUnit_ContextImageEmbedder): one loop samples for all of them. diffusers' own loops take
images, which they scale to an area of 1024 x 1024 pixels, and one prompt at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from diffusers import QwenImagePipeline

from zerotrain.models.families.conditioned_sampling import extended_input
from zerotrain.models.families.patches import append_conditioning


class ConditionedQwenImagePipeline(QwenImagePipeline):  # type: ignore[misc]
    """QwenImagePipeline that takes `conditioning_latents` [B, n, C, h, w] with embeddings.

    Attributes:
        encoding: The pipeline that encodes prompts, of the class that the base names.
    """

    encoding: Any

    @classmethod
    def around(cls, pipeline: Any) -> ConditionedQwenImagePipeline:
        """Build a pipeline around the parts of another pipeline of Qwen-Image."""
        names = ("scheduler", "vae", "text_encoder", "tokenizer", "transformer")
        made = cls(**{name: getattr(pipeline, name) for name in names})
        made.set_progress_bar_config(disable=True)
        made.encoding = pipeline
        return made

    @functools.wraps(QwenImagePipeline.__call__)
    def __call__(
        self, *values: Any, conditioning_latents: torch.Tensor | None = None, **named: Any
    ) -> Any:
        def extend(given: Mapping[str, Any]) -> dict[str, Any]:
            [[grid], *_] = given["img_shapes"]
            patches, grids = append_conditioning(given["hidden_states"], grid, conditioning_latents)
            return {"hidden_states": patches, "img_shapes": grids}

        if conditioning_latents is None:
            return super().__call__(*values, **named)
        with extended_input(self.transformer, extend):
            return super().__call__(*values, **named)

    def encode_prompt(
        self, prompt_embeds: torch.Tensor, prompt_embeds_mask: torch.Tensor | None, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return embeddings unchanged: with images they exceed the limit of QwenImagePipeline."""
        mask = prompt_embeds_mask
        return prompt_embeds, None if mask is not None and mask.all() else mask


def encoding_pipeline(pipeline: Any) -> Any:
    """Return the pipeline that encodes the prompts of another; itself by default."""
    return getattr(pipeline, "encoding", pipeline)
