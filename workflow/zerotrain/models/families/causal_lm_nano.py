"""A small Qwen2 built from a seed: the presets `nano` and `micro` of causal language models."""

from __future__ import annotations

from typing import Any

from transformers import Qwen2Config, Qwen2ForCausalLM

from zerotrain.models.families.language_nano import MAX_TOKENS, SmallLanguageModel

WIDTH = {"nano": 64, "micro": 192}
LAYERS = {"nano": 2, "micro": 3}
"""The models have 0.2 and 1.9 million parameters."""


def nano_config(tokenizer: Any, preset: str) -> Any:
    """Return the configuration of a small Qwen2, its head tied as in the series' small models."""
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


SMALL = SmallLanguageModel(Qwen2ForCausalLM, nano_config, seq2seq=False)
