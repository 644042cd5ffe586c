"""merged: the adapter added to the weights of its base, layer by layer and by peft itself."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from zerotrain.errors import PipelineError
from zerotrain.formats import Options
from zerotrain.formats.diffusers_folder import verify_folder, write_folder
from zerotrain.formats.tensors import Stored
from zerotrain.formats.weights import NAME, Adapter, ExportedWeights, file_name


def write(weights: ExportedWeights, options: Options, out: Path) -> dict[str, str]:
    """Write a whole model that needs no adapter; sha256 of files by name."""
    return write_folder(weights, merged_tensors(weights), options, out)


def verify(weights: ExportedWeights, options: Options, out: Path) -> None:
    """Load the part with the library and compare it with the merged tensors bit by bit."""
    verify_folder(weights, merged_tensors(weights), options, out)


def merged_tensors(weights: ExportedWeights) -> dict[str, Stored]:
    """The trained part's tensors, float32 where the adapter changes them; a layer at a time."""
    adapter = weights.adapter
    assert adapter is not None
    layers = adapter.layers_of(weights.family.empty_model(weights.folder))
    if tied := [name for name in layers if f"{name}.weight" not in weights.trained]:
        raise PipelineError(
            f"--to merged: {tied[0]} shares its weights with another layer, which an adapter to it "
            "alone would change, too",
            hint="choose --to peft, or train without it among lora.target_modules",
        )

    def merged(name: str, stored: Stored) -> Stored:
        layer, _, kind = name.rpartition(".")
        if layer not in layers:
            return stored

        def read() -> torch.Tensor:
            return _merge(layers[layer], layer, weights.trained, adapter, kind)

        return Stored(stored.dtype, stored.shape, read)

    return {name: merged(name, stored) for name, stored in weights.trained.items()}


@torch.no_grad()
def _merge(
    layer: Any,
    name: str,
    base: dict[str, Stored],
    adapter: Adapter,
    kind: str,
) -> torch.Tensor:
    """The weight or bias of one layer, given without storage, after peft has merged into it."""
    layer = copy.deepcopy(layer)

    def value(own: str) -> torch.Tensor:
        known, key = (base, own.removeprefix("base_layer."))
        if not own.startswith("base_layer."):
            known, key = adapter.tensors, own.replace(f".{NAME}", "")
        # A copy: peft adds in place, and what is read may be the open file's own pages.
        return known[file_name(f"{name}.{key}")].read().to(torch.float32, copy=True)

    layer.load_state_dict({own: value(own) for own in layer.state_dict()}, assign=True)
    layer.merge()
    found: torch.Tensor = getattr(layer.get_base_layer(), kind)
    return found.detach()
