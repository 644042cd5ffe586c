"""Which layers get a LoRA, by their names: no library of models is needed to say it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeAlias

ALL_LINEAR = "all-linear"
Targets: TypeAlias = "Sequence[str] | str | None"
"""Ends of layers' names; ALL_LINEAR; or None for the attention's projections."""
ATTENTION = (
    *("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
    *("q_proj", "k_proj", "v_proj", "o_proj", "out_proj", "SelfAttention.q", "SelfAttention.k"),
    *("SelfAttention.v", "SelfAttention.o", "EncDecAttention.q", "EncDecAttention.k"),
    *("EncDecAttention.v", "EncDecAttention.o", "query_key_value", "c_attn"),
)
"""Projections of an attention, as the models of diffusers and transformers name them."""
NO_LAYER = re.compile(r"(^|\.)(shared|lm_head|wte|wpe|relative_attention_bias|\w*embed(?!der)\w*)$")
"""Tables of tokens and places, and the head: their weights look like those of linear layers. An
`embedder`, as in Flux, is one."""


def is_target(layer: str, targets: Sequence[str]) -> bool:
    """Whether a layer's name ends in one of these, at whole components."""
    return any(f".{layer}".endswith(f".{target}") for target in targets)


def targeted(layer: str, shape: Sequence[int], targets: Targets) -> bool:
    """Whether a layer whose weight has this shape gets an adapter."""
    if targets == ALL_LINEAR:
        return len(shape) == 2 and NO_LAYER.search(layer) is None
    assert not isinstance(targets, str)
    return is_target(layer, ATTENTION if targets is None else targets)
