"""Positions of a language model: the length of a row, and what keeps packed examples apart."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from zerotrain.errors import PipelineError
from zerotrain.machine.memory_errors import find_out_of_memory
from zerotrain.models.pretrained import from_config, from_pretrained


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


LENGTH = 8
"""Tokens of each of two examples."""
VOCABULARY = 64
WIDTHS = (
    *("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"),
    *("ffn_dim", "ffn_hidden_size", "n_inner"),
)
"""Widths of the layers between attentions, which mix no tokens: they are made small."""
TOLERANCE = 1e-4
"""Relative to the largest logit; another order of sums changes 1e-6, a visible example 0.1."""
WITHOUT = "set train.packing to false, or choose a base whose examples stay apart, such as Qwen2.5"


def check_packable(base: Path) -> None:
    """Check that packed examples do not see each other in a base model, on a small copy of it.

    Only positions that restart with each example separate them (see families.Batch).
    transformers masks by them in most models, but not in all: some take no positions (ALiBi: BLOOM,
    MPT), some build their own mask (OPT), some carry a state along a row (Mamba and its hybrids).

    Raises:
        PipelineError: they do, or may; the model's class is named.
    """
    config = from_pretrained(transformers.AutoConfig, base)
    found: Any = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    kind = found[0] if isinstance(found, tuple) else found
    if "position_ids" not in inspect.signature(kind.forward).parameters:
        raise PipelineError(
            f"train.packing: {kind.__name__} takes no position_ids, so that the examples of a row "
            "would see each other",
            hint=WITHOUT,
        )
    try:
        seen = _difference(config)
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        if find_out_of_memory(error):
            raise
        raise PipelineError(
            f"train.packing: a small {kind.__name__} could not be asked whether the examples of a "
            f"row see each other ({error})",
            hint=WITHOUT,
        ) from error
    if not seen <= TOLERANCE:  # true for NaN, too
        raise PipelineError(
            f"train.packing: in {kind.__name__} the examples of a row see each other: the logits "
            f"of a second one differ by {seen:.2g} of the largest from those that it has alone",
            hint=WITHOUT,
        )


def _difference(config: Any) -> float:
    """Return how much an example before it changes another's logits, relative to the largest."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = from_config(transformers.AutoModelForCausalLM, _small(config), dtype=torch.float32)
        for parameter in model.parameters():  # some start at zero and would hide a difference
            parameter.data += 0.05 * torch.randn(parameter.shape)
        tokens = torch.randint(3, VOCABULARY, (1, 2 * LENGTH))
    places = torch.arange(LENGTH)[None]
    with torch.inference_mode():
        row = model.eval()(
            input_ids=tokens, position_ids=places.repeat(1, 2), use_cache=False
        ).logits[:, LENGTH:]
        alone = model(input_ids=tokens[:, LENGTH:], position_ids=places, use_cache=False).logits
    return float((row - alone).abs().max() / alone.abs().max())


def _small(config: Any) -> Any:
    """Reduce a configuration to few narrow layers, with at least one of each kind."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or ["all"]
    layers = 1 + max(kinds.index(kind) for kind in kinds)
    text.num_hidden_layers = layers
    if kinds != ["all"]:
        text.layer_types = kinds[:layers]
    for name in WIDTHS:
        if getattr(text, name, None):
            setattr(text, name, VOCABULARY)
    text.vocab_size = VOCABULARY
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(text, name, None)
    return config
