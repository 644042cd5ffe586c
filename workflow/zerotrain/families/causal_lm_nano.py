"""A small Qwen2 built from a seed: the preset `nano` of causal language models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

from zerotrain.families.language_nano import MAX_TOKENS, train_tokenizer

if TYPE_CHECKING:
    from zerotrain.data.conversation import Conversation

WIDTH = 64
LAYERS = 2


def build_nano(conversations: Sequence[Conversation], seed: int, out: Path) -> None:
    """Write model and tokenizer into `out`; equal arguments give equal files."""
    logging.disable_progress_bar()
    tokenizer = train_tokenizer(conversations, seq2seq=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = Qwen2ForCausalLM(nano_config(len(tokenizer), tokenizer))
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def nano_config(vocabulary: int, tokenizer: Any) -> Any:
    """Qwen2 in small, its head tied to its embeddings as in the small ones of the series."""
    return Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_TOKENS,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
