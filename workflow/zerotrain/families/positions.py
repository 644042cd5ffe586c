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


def longest_prompt(config: Any) -> int:
    """Tokens of a prompt that leave a position for its answer, where both are in one table."""
    return positions(config) - (not config.is_encoder_decoder)


def refuse_too_long(base: Path, max_length: int) -> None:
    """Refuse rows that are longer than the base model's table.

    Raises:
        PipelineError: naming both lengths.
    """
    most = positions(transformers.AutoConfig.from_pretrained(base))
    if max_length > most:
        raise PipelineError(
            f"train.max_length: {max_length} tokens, and {base} has {most} positions",
            hint=f"set train.max_length to {most}, or choose a base that computes positions, such "
            "as Qwen2.5",
        )
