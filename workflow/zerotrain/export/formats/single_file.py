"""single_file: the trained part's tensors in one safetensors file, with or without a prefix.

DiffSynth-Studio reads such files; the default here corresponds to its `--remove_prefix_in_ckpt
"pipe.dit."`, and `--prefix pipe.dit.` to its files without that option. It multiplies a LoRA's
factors as they are and reads no header, so the second one includes the scale. It has no DoRA.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file

from zerotrain.export.formats import Options
from zerotrain.export.formats.diffusers_lora import verify_adapter
from zerotrain.export.formats.tensors import LazyTensor, verify_tensors, write_tensors
from zerotrain.export.formats.weights import (
    SECOND_FACTOR,
    Adapter,
    ExportedWeights,
    model_without_memory,
)
from zerotrain.models.adapter_config import METADATA

FILE = "model.safetensors"


def write(weights: ExportedWeights, options: Options, out: Path) -> dict[str, str]:
    """Write the file, with only the adapter if one was trained; return its sha256 by name."""
    tensors, header = weights.trained, weights.lineage()
    if weights.adapter is not None:
        adapter, _ = _fold_scales(weights.adapter, weights.scales)
        tensors = adapter.tensors
        settings = {f"{options.prefix}{k}": v for k, v in adapter.settings.items()}
        header[METADATA] = json.dumps(settings, sort_keys=True)
    named = {f"{options.prefix}{name}": tensor for name, tensor in tensors.items()}
    return {FILE: write_tensors(out / FILE, named, options.dtype, header)}


def verify(weights: ExportedWeights, options: Options, out: Path) -> None:
    """Load the file into the library's own model and compare it bit by bit."""
    if weights.adapter is not None:
        model = model_without_memory(weights)
        prefix = options.prefix.removesuffix(".") or None
        model.load_lora_adapter(  # type: ignore[operator]
            str(out), prefix=prefix, weight_name=FILE
        )
        adapter, scales = _fold_scales(weights.adapter, weights.scales)
        verify_adapter(adapter, scales, model, options.dtype, out)
        return
    model = weights.family.empty_model(weights.folder)
    state = {n.removeprefix(options.prefix): t for n, t in load_file(out / FILE).items()}
    model.load_state_dict(state, strict=False, assign=True)
    # The file has only the first of tied weights.
    tied = getattr(model, "all_tied_weights_keys", {})
    held = {n: t for n, t in model.state_dict().items() if n not in tied or not t.is_meta}
    verify_tensors(weights.trained, held, options.dtype, out)


def _fold_scales(
    adapter: Adapter, scales: Mapping[str, float]
) -> tuple[Adapter, Mapping[str, float]]:
    """Return the LoRA with each layer's scale folded into its second factor, and scales of 1."""
    if adapter.settings.get("use_dora"):  # its readers need the header anyway
        return adapter, scales
    settings = adapter.settings | {"lora_alpha": adapter.settings["r"], "use_rslora": False}
    settings["alpha_pattern"] = settings.get("rank_pattern", {})

    def folded(name: str, stored: LazyTensor) -> LazyTensor:
        layer, second, _ = name.partition(SECOND_FACTOR)
        if not second:
            return stored

        def read() -> torch.Tensor:
            return stored.read().float() * scales[layer]

        return LazyTensor(stored.dtype, stored.shape, read)

    tensors = {name: folded(name, stored) for name, stored in adapter.tensors.items()}
    return Adapter(settings, tensors), dict.fromkeys(scales, 1.0)
