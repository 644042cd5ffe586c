"""A small Qwen2 built from a seed: the presets `nano` and `micro` of causal language models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import Qwen2Config, Qwen2ForCausalLM

from zerotrain.families.language_nano import MAX_TOKENS, train_tokenizer, write_model

if TYPE_CHECKING:
    from zerotrain.data.conversation import Conversation

CLASS = Qwen2ForCausalLM
WIDTH = {"nano": 64, "micro": 192}
LAYERS = {"nano": 2, "micro": 3}
"""Models of 0.2 and 1.9 million parameters."""


def build_nano(
    conversations: Sequence[Conversation], seed: int, out: Path, *, preset: str = "nano"
) -> None:
    """Write model and tokenizer into `out`; equal arguments give equal files."""
    tokenizer = train_tokenizer(conversations, seq2seq=False)
    write_model(lambda words: CLASS(nano_config(words, preset)), tokenizer, seed, out)


def nano_config(tokenizer: Any, preset: str) -> Any:
    """Qwen2 in small, its head tied to its embeddings as in the small ones of the series."""
    return Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH[preset],
        intermediate_size=4 * WIDTH[preset],
        num_hidden_layers=LAYERS[preset],
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_TOKENS,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
