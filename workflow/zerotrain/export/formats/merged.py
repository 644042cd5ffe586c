"""merged: the adapter merged into the weights of its base by peft itself; a LoRA by layers."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zerotrain.errors import PipelineError
from zerotrain.export.formats import Options
from zerotrain.export.formats.library_folder import verify_folder, write_folder
from zerotrain.export.formats.tensors import LazyTensor
from zerotrain.export.formats.weights import NAME, Adapter, ExportedWeights, file_name
from zerotrain.models.families.adapters import FOLDER
from zerotrain.models.pretrained import load_peft


def write(weights: ExportedWeights, options: Options, out: Path) -> dict[str, str]:
    """Write a whole model that needs no adapter, and return the sha256 of its files by name."""
    return write_folder(weights, merged_tensors(weights), options, out)


def verify(weights: ExportedWeights, options: Options, out: Path) -> None:
    """Load the part with the library and compare it with the merged tensors bit by bit."""
    verify_folder(weights, merged_tensors(weights), options, out)


def merged_tensors(weights: ExportedWeights) -> dict[str, LazyTensor]:
    """Return the trained part's tensors by name; those that the adapter changes read as float32."""
    if weights.method is not None:
        return _merge_model(weights)
    adapter = weights.adapter
    assert adapter is not None
    layers = adapter.layers_of(weights.family.empty_model(weights.folder))
    if tied := [name for name in layers if f"{name}.weight" not in weights.trained]:
        raise PipelineError(
            f"--to merged: {tied[0]} shares its weights with another layer, which an adapter to it "
            "alone would change, too",
            hint="choose --to peft, or train without it among lora.target_modules",
        )

    def merged(name: str, stored: LazyTensor) -> LazyTensor:
        layer, _, kind = name.rpartition(".")
        if layer not in layers:
            return stored

        def read() -> torch.Tensor:
            return _merge(layers[layer], layer, weights.trained, adapter, kind)

        return LazyTensor(stored.dtype, stored.shape, read)

    return {name: merged(name, stored) for name, stored in weights.trained.items()}


@torch.no_grad()
def _merge_model(weights: ExportedWeights) -> dict[str, LazyTensor]:
    """Merge an adapter of a method other than LoRA; all tensors are held in float32."""
    model: Any = weights.family.load_model(weights.folder)
    model = load_peft(model, weights.folder / FOLDER).merge_and_unload()
    held = model.state_dict()
    return {
        name: LazyTensor(
            held[name].dtype, stored.shape, partial(held[name].to, torch.float32, copy=True)
        )
        for name, stored in weights.trained.items()
    }


@torch.no_grad()
def _merge(
    layer: Any,
    name: str,
    base: dict[str, LazyTensor],
    adapter: Adapter,
    kind: str,
) -> torch.Tensor:
    """Return weight or bias of one layer, given without storage, after peft's merge."""
    layer = copy.deepcopy(layer)

    def value(own: str) -> torch.Tensor:
        known, key = (base, own.removeprefix("base_layer."))
        if not own.startswith("base_layer."):
            known, key = adapter.tensors, own.replace(f".{NAME}", "")
        # A copy: peft adds in place, and the tensor may map the file's pages.
        return known[file_name(f"{name}.{key}")].read().to(torch.float32, copy=True)

    layer.load_state_dict({own: value(own) for own in layer.state_dict()}, assign=True)
    layer.merge()
    tensor: torch.Tensor = getattr(layer.get_base_layer(), kind)
    return tensor.detach()
