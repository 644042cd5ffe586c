"""A small T5 built from a seed: the presets `nano` and `micro` of seq2seq language models."""

from __future__ import annotations

from typing import Any

from transformers import T5Config, T5ForConditionalGeneration

from zerotrain.models.families.language_nano import SmallLanguageModel

WIDTH = {"nano": 64, "micro": 192}
LAYERS = {"nano": 2, "micro": 3}
"""The models have 0.3 and 3.3 million parameters."""


def nano_config(tokenizer: Any, preset: str) -> Any:
    """Return the configuration of a small T5; as in the first T5, the head is tied."""
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


SMALL = SmallLanguageModel(T5ForConditionalGeneration, nano_config, seq2seq=True)
