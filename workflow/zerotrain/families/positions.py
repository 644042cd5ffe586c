"""The table of positions that some language models have: a longer row does not fit it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import transformers

from zerotrain.errors import PipelineError


def positions(config: Any) -> int:
    """Rows of a model's table (GPT-2, OPT, BART); sys.maxsize where positions are computed (Qwen2,
    T5)."""
    text = config.get_text_config()
    if getattr(text, "rope_parameters", None):
        return sys.maxsize
    return getattr(text, "max_position_embeddings", None) or sys.maxsize


def free_positions(model: Any) -> int:
    """Rows of a model's table that a trained prompt, if it has one, leaves to texts."""
    adapter: Any = getattr(model, "active_peft_config", None)
    prompted = adapter is not None and adapter.is_prompt_learning
    return positions(model.config) - (adapter.num_virtual_tokens if prompted else 0)


def longest_prompt(model: Any) -> int:
    """Tokens of a prompt that leave a position for its answer, where both are in one table."""
    return free_positions(model) - (not model.config.is_encoder_decoder)


def refuse_too_long(base: Path, max_length: int, virtual_tokens: int = 0) -> None:
    """Refuse rows that are longer than the base model's table, less those of a trained prompt.

    Raises:
        PipelineError: naming both lengths.
    """
    most = positions(transformers.AutoConfig.from_pretrained(base)) - virtual_tokens
    if max_length > most:
        taken = f" left by a trained prompt of {virtual_tokens}" if virtual_tokens else ""
        raise PipelineError(
            f"train.max_length: {max_length} tokens, and {base} has {most} positions{taken}",
            hint=f"set train.max_length to {most}, or choose a base that computes positions, such "
            "as Qwen2.5",
        )
