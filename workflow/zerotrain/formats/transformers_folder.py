"""transformers: a language model's folder, its tensors in another type or other shards.

Tokenizer, chat template and generation config go with it; of an adapter the base, too, so that
AutoModelForCausalLM.from_pretrained alone loads it.
"""

from __future__ import annotations

from pathlib import Path

from zerotrain.formats import Options, peft_adapter
from zerotrain.formats.diffusers_folder import link, verify_folder, write_folder
from zerotrain.formats.weights import ExportedWeights


def write(weights: ExportedWeights, options: Options, out: Path) -> dict[str, str]:
    """Write the folder; sha256 of files by name."""
    if weights.adapter is None:
        return write_folder(weights, weights.trained, options, out)
    linked = link(weights, [*weights.others(), *weights.own()], out)
    return linked | peft_adapter.write(weights, options, out)


def verify(weights: ExportedWeights, options: Options, out: Path) -> None:
    """Load the model, or the adapter, with the library and compare it bit by bit."""
    if weights.adapter is not None:
        peft_adapter.verify(weights, options, out)
    else:
        verify_folder(weights, weights.trained, options, out)
