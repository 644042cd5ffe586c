"""diffusers and transformers: a whole model's folder, with its tensors in another type or shards.

A language model's has tokenizer, chat template and generation config, and with an adapter the base,
too, so that AutoModelForCausalLM.from_pretrained loads it without other files.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from zerotrain.artifact import link_or_copy
from zerotrain.config.families import ROOT
from zerotrain.export.formats import Options, diffusers_lora, peft_adapter
from zerotrain.export.formats.tensors import LazyTensor, check_finite, verify_tensors
from zerotrain.export.formats.weights import ExportedWeights
from zerotrain.models.families.model_tensors import stored_tensors


def write(weights: ExportedWeights, options: Options, out: Path) -> dict[str, str]:
    """Write the folder, link untrained parts, and return the sha256 of files by name."""
    if weights.adapter is None:
        return write_folder(weights, weights.trained, options, out)
    linked = link(weights, [*weights.base_files(), *weights.trained_files()], out)
    written: dict[str, str] = _adapter_format(weights).write(weights, options, out)
    return linked | written


def verify(weights: ExportedWeights, options: Options, out: Path) -> None:
    """Load the trained part, or the adapter, with the library and compare it bit by bit."""
    if weights.adapter is not None:
        _adapter_format(weights).verify(weights, options, out)
    else:
        verify_folder(weights, weights.trained, options, out)


def _adapter_format(weights: ExportedWeights) -> ModuleType:
    return peft_adapter if weights.part == ROOT else diffusers_lora


def write_folder(
    weights: ExportedWeights, trained: dict[str, LazyTensor], options: Options, out: Path
) -> dict[str, str]:
    """Write a whole model whose trained part has these tensors."""
    linked = link(weights, weights.base_files(), out)
    written = weights.family.save_model(
        weights.folder,
        {name: list(tensor.shape) for name, tensor in trained.items()},
        lambda name: check_finite(name, trained[name].read(), options.dtype),
        options.dtype,
        out,
        max_shard_size=options.max_shard_size,
        metadata=weights.lineage(),
    )
    return linked | written


def verify_folder(
    weights: ExportedWeights, trained: dict[str, LazyTensor], options: Options, out: Path
) -> None:
    """Load the part with the library and compare it with these tensors."""
    loaded = stored_tensors(weights.family.load_model(out, options.dtype))
    verify_tensors(trained, loaded, options.dtype, out)


def link(weights: ExportedWeights, names: list[str], out: Path) -> dict[str, str]:
    """Link or copy files of the weights, and return their sha256 by name."""
    for name in names:
        link_or_copy(weights.artifact.path(name), out / name)
    return {name: weights.artifact.files[name]["sha256"] for name in names}
