"""A small T5 built from a seed: the preset `nano` of seq2seq language models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import T5Config, T5ForConditionalGeneration
from transformers.utils import logging

from zerotrain.families.language_nano import train_tokenizer

if TYPE_CHECKING:
    from zerotrain.data.conversation import Conversation

WIDTH = 64
LAYERS = 2


def build_nano(conversations: Sequence[Conversation], seed: int, out: Path) -> None:
    """Write model and tokenizer into `out`; equal arguments give equal files."""
    logging.disable_progress_bar()
    tokenizer = train_tokenizer(conversations, seq2seq=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = T5ForConditionalGeneration(nano_config(len(tokenizer), tokenizer))
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def nano_config(vocabulary: int, tokenizer: Any) -> Any:
    """T5 in small; as in the first T5 the head is tied to the embeddings."""
    return T5Config(
        vocab_size=vocabulary,
        d_model=WIDTH,
        d_kv=WIDTH // 4,
        d_ff=4 * WIDTH,
        num_layers=LAYERS,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=tokenizer.pad_token_id,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
