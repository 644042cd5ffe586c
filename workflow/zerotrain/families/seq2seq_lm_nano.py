"""A small T5 built from a seed: the presets `nano` and `micro` of seq2seq language models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import T5Config, T5ForConditionalGeneration

from zerotrain.families.language_nano import train_tokenizer, write_model

if TYPE_CHECKING:
    from zerotrain.data.conversation import Conversation

CLASS = T5ForConditionalGeneration
WIDTH = {"nano": 64, "micro": 192}
LAYERS = {"nano": 2, "micro": 3}
"""Models of 0.3 and 3.3 million parameters."""


def build_nano(
    conversations: Sequence[Conversation], seed: int, out: Path, *, preset: str = "nano"
) -> None:
    """Write model and tokenizer into `out`; equal arguments give equal files."""
    tokenizer = train_tokenizer(conversations, seq2seq=True)
    write_model(lambda words: CLASS(nano_config(words, preset)), tokenizer, seed, out)


def nano_config(tokenizer: Any, preset: str) -> Any:
    """T5 in small; as in the first T5 the head is tied to the embeddings."""
    return T5Config(
        vocab_size=len(tokenizer),
        d_model=WIDTH[preset],
        d_kv=WIDTH[preset] // 4,
        d_ff=4 * WIDTH[preset],
        num_layers=LAYERS[preset],
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=tokenizer.pad_token_id,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
