"""diffusers_lora: the file that a pipeline's load_lora_weights takes, with rank and alpha in it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch

from zerotrain.families.lora import ADAPTER, METADATA
from zerotrain.formats import Options
from zerotrain.formats.tensors import hold_to, otherwise, write_tensors
from zerotrain.formats.weights import Adapter, ExportedWeights, file_name, model_without_memory


def write(weights: ExportedWeights, options: Options, out: Path) -> dict[str, str]:
    """Write the file; its sha256 by name."""
    adapter = weights.adapter
    assert adapter is not None
    settings = {f"{weights.part}.{key}": value for key, value in adapter.settings.items()}
    said = weights.lineage() | {METADATA: json.dumps(settings, sort_keys=True)}
    named = {f"{weights.part}.{name}": tensor for name, tensor in adapter.tensors.items()}
    return {ADAPTER: write_tensors(out / ADAPTER, named, options.dtype, said)}


def verify(weights: ExportedWeights, options: Options, out: Path) -> None:
    """Load the file into a model without weights and compare factors and scales."""
    model = model_without_memory(weights)
    model.load_lora_adapter(  # type: ignore[operator]
        str(out), prefix=weights.part, weight_name=ADAPTER
    )
    assert weights.adapter is not None
    hold_adapter_to(weights.adapter, weights.scales, model, options.dtype, out)


def hold_adapter_to(
    adapter: Adapter,
    scales: Mapping[str, float],
    model: torch.nn.Module,
    dtype: torch.dtype,
    where: Path,
) -> None:
    """Hold an adapter that a library loaded to the trained one: factors bit by bit, and scales.

    Args:
        adapter: What was written.
        scales: What each of its layers' factors are multiplied with.
        model: The denoiser with the loaded adapter; its own weights may be without storage.
        dtype: Type of the file.
        where: What messages call the file.

    Raises:
        PipelineError: naming the first tensor or layer that differs.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    loaded = {_plain(n): t for n, t in model.state_dict().items() if ".lora_" in n}
    hold_to(adapter.tensors, loaded, dtype, where)
    for name, layer in model.named_modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        scale, expected = next(iter(layer.scaling.values())), scales[_layer(name)]
        if abs(scale - expected) > 1e-6 * expected:
            raise otherwise(f"{name} is scaled by {scale:g} instead of {expected:g}", where)


def _plain(name: str) -> str:
    """A factor's name without that of the adapter, and without the wrapper of peft's own model."""
    return file_name(re.sub(r"(\.lora_\w+)\.[^.]+\.", r"\1.", _layer(name)))


def _layer(name: str) -> str:
    return name.removeprefix("base_model.model.")
