"""diffusers_lora: the file that a pipeline's load_lora_weights reads, with rank and alpha."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from zerotrain.export.formats import Options
from zerotrain.export.formats.tensors import mismatch, verify_tensors, write_tensors
from zerotrain.export.formats.weights import (
    Adapter,
    ExportedWeights,
    model_without_memory,
    plain_name,
)
from zerotrain.models.adapter_config import METADATA
from zerotrain.models.families.lora import ADAPTER


def write(weights: ExportedWeights, options: Options, out: Path) -> dict[str, str]:
    """Write the file, and return its sha256 by name."""
    adapter = weights.adapter
    assert adapter is not None
    settings = {f"{weights.part}.{key}": value for key, value in adapter.settings.items()}
    header = weights.lineage() | {METADATA: json.dumps(settings, sort_keys=True)}
    named = {f"{weights.part}.{name}": tensor for name, tensor in adapter.tensors.items()}
    return {ADAPTER: write_tensors(out / ADAPTER, named, options.dtype, header)}


def verify(weights: ExportedWeights, options: Options, out: Path) -> None:
    """Load the file into a model without weights and compare factors and scales."""
    model = model_without_memory(weights)
    model.load_lora_adapter(  # type: ignore[operator]
        str(out), prefix=weights.part, weight_name=ADAPTER
    )
    assert weights.adapter is not None
    verify_adapter(weights.adapter, weights.scales, model, options.dtype, out)


def verify_adapter(
    adapter: Adapter,
    scales: Mapping[str, float],
    model: torch.nn.Module,
    dtype: torch.dtype,
    where: Path,
) -> None:
    """Compare a loaded adapter with the trained one: factors bit by bit, and scales.

    Args:
        adapter: The written adapter.
        scales: The scale of each of its layers' factors.
        model: The denoiser with the loaded adapter; its own weights may be without storage.
        dtype: Type of the file.
        where: The file's name in messages.

    Raises:
        PipelineError: a tensor or layer differs; the first is named.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    loaded = {plain_name(_layer(n)): t for n, t in model.state_dict().items() if ".lora_" in n}
    verify_tensors(adapter.tensors, loaded, dtype, where)
    for name, layer in model.named_modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        scale, expected = next(iter(layer.scaling.values())), scales[_layer(name)]
        if abs(scale - expected) > 1e-6 * expected:
            raise mismatch(f"{name} is scaled by {scale:g} instead of {expected:g}", where)


def _layer(name: str) -> str:
    return name.removeprefix("base_model.model.")
