"""Encoding of prompts of any length with two CLIP text encoders, one chunk at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zerotrain.models.families.prompt_tokens import PromptTokenizer


def count_chunks(tokenizers: Mapping[str, PromptTokenizer], prompts: Sequence[str]) -> list[int]:
    """Count the chunks of each prompt: the maximum over the tokenizers."""
    counts = [tokenizer.chunks(prompts) for tokenizer in tokenizers.values()]
    return [max(row) for row in zip(*counts, strict=True)]


@torch.inference_mode()
def encode_chunks(
    pipeline: Any,
    tokenizers: Mapping[str, PromptTokenizer],
    prompts: Sequence[str],
    count: int,
    guided: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
    """Encode the first `count` chunks of B prompts; a prompt that has fewer gets empty ones.

    Args:
        pipeline: An SDXL pipeline of diffusers.
        tokenizers: Its tokenizers, from set_prompt_tokenizers.
        prompts: B prompts.
        count: Chunks of each.
        guided: Whether the negative embeddings of the empty prompt are encoded, too.

    Returns:
        Embeddings [B, count * T, D], negative ones, and both pooled [B, P], of the first chunk.
    """
    parts = []
    try:
        for chunk in range(count):
            for tokenizer in tokenizers.values():
                tokenizer.chunk = chunk
            parts.append(pipeline.encode_prompt(list(prompts), do_classifier_free_guidance=guided))
    finally:
        for tokenizer in tokenizers.values():
            tokenizer.chunk = 0
    embeds = torch.cat([part[0] for part in parts], dim=1)
    negative = torch.cat([part[1] for part in parts], dim=1) if guided else None
    return embeds, negative, parts[0][2], parts[0][3]
