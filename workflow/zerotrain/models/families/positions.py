"""The table of positions of some language models, which limits the length of a row."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import transformers

from zerotrain.errors import PipelineError
from zerotrain.models.pretrained import from_pretrained


def positions(config: Any) -> int:
    """Return the rows of a model's table (GPT-2, OPT, BART); sys.maxsize for none (Qwen2, T5)."""
    text = config.get_text_config()
    if getattr(text, "rope_parameters", None):
        return sys.maxsize
    return getattr(text, "max_position_embeddings", None) or sys.maxsize


def longest_prompt(model: Any) -> int:
    """Return the most prompt tokens that leave a position for an answer in the same table."""
    return positions(model.config) - (not model.config.is_encoder_decoder)


def check_row_length(base: Path, max_length: int) -> None:
    """Check that rows fit into the base model's table.

    Raises:
        PipelineError: they do not; both lengths are named.
    """
    most = positions(from_pretrained(transformers.AutoConfig, base))
    if max_length > most:
        raise PipelineError(
            f"train.max_length: {max_length} tokens, and {base} has {most} positions",
            hint=f"set train.max_length to {most}, or choose a base that computes positions, such "
            "as Qwen2.5",
        )
