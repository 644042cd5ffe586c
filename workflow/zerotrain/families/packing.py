"""Whether a causal model keeps packed examples apart: it is asked, on a small copy of itself.

Positions that begin anew with each example are all that tells them apart (see
zerotrain.families.Batch). transformers masks by them in most of its models, but not in all: some
know no positions (ALiBi: BLOOM, MPT), some mask by themselves (OPT), some carry a state along a row
(Mamba and its hybrids).
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
import transformers

from zerotrain.errors import PipelineError

LENGTH = 8
"""Tokens of each of two examples."""
VOCABULARY = 64
WIDTHS = (
    *("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"),
    *("ffn_dim", "ffn_hidden_size", "n_inner"),
)
"""Of the layers between attentions, which mix no tokens: they are made small."""
TOLERANCE = 1e-4
"""Of the largest logit; sums in another order differ by 1e-6, an example that is seen by 0.1."""
WITHOUT = "set train.packing to false, or choose a base whose examples stay apart, such as Qwen2.5"


def refuse_unpackable(base: Path) -> None:
    """Refuse a base model in which packed examples would see each other.

    Raises:
        PipelineError: naming the class, and what it does.
    """
    config = transformers.AutoConfig.from_pretrained(base)
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
        raise PipelineError(
            f"train.packing: a small {kind.__name__} could not be asked whether the examples of a "
            f"row see each other ({error})",
            hint=WITHOUT,
        ) from error
    if not seen <= TOLERANCE:  # also where it is no number
        raise PipelineError(
            f"train.packing: in {kind.__name__} the examples of a row see each other: the logits "
            f"of a second one differ by {seen:.2g} of the largest from those that it has alone",
            hint=WITHOUT,
        )


def _difference(config: Any) -> float:
    """How far an example's logits move where another stands before it, of the largest logit."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(_small(config), dtype=torch.float32)
        for parameter in model.parameters():  # some begin at zero, and would hide a difference
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
    """The configuration with few layers, one of each kind at least, and narrow ones between."""
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
