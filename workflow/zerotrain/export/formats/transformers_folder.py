"""transformers: a language model's folder, with its tensors in another type or other shards.

It includes tokenizer, chat template and generation config, and with an adapter the base, too, so
that AutoModelForCausalLM.from_pretrained loads it without other files.
"""

from __future__ import annotations

from pathlib import Path

from zerotrain.export.formats import Options, peft_adapter
from zerotrain.export.formats.diffusers_folder import link, verify_folder, write_folder
from zerotrain.export.formats.weights import ExportedWeights


def write(weights: ExportedWeights, options: Options, out: Path) -> dict[str, str]:
    """Write the folder, and return the sha256 of its files by name."""
    if weights.adapter is None:
        return write_folder(weights, weights.trained, options, out)
    linked = link(weights, [*weights.base_files(), *weights.trained_files()], out)
    return linked | peft_adapter.write(weights, options, out)


def verify(weights: ExportedWeights, options: Options, out: Path) -> None:
    """Load the model, or the adapter, with the library and compare it bit by bit."""
    if weights.adapter is not None:
        peft_adapter.verify(weights, options, out)
    else:
        verify_folder(weights, weights.trained, options, out)
