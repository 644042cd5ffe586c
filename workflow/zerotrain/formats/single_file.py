"""single_file: the trained part's tensors in one safetensors file, with a prefix or without.

DiffSynth-Studio reads such files; its `--remove_prefix_in_ckpt "pipe.dit."` is the default here,
and `--prefix pipe.dit.` what it writes without that. Of a LoRA it multiplies the factors
as they are and reads no header, so the scale is in the second one. It knows no DoRA.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file

from zerotrain.families.lora import METADATA
from zerotrain.formats import Options
from zerotrain.formats.diffusers_lora import hold_adapter_to
from zerotrain.formats.tensors import Stored, hold_to, write_tensors
from zerotrain.formats.weights import (
    SECOND_FACTOR,
    Adapter,
    ExportedWeights,
    model_without_memory,
)

FILE = "model.safetensors"


def write(weights: ExportedWeights, options: Options, out: Path) -> dict[str, str]:
    """Write the file, of an adapter's tensors where one was trained; its sha256 by name."""
    tensors, said = weights.trained, weights.lineage()
    if weights.adapter is not None:
        adapter, _ = _folded(weights.adapter, weights.scales)
        tensors = adapter.tensors
        settings = {f"{options.prefix}{k}": v for k, v in adapter.settings.items()}
        said[METADATA] = json.dumps(settings, sort_keys=True)
    named = {f"{options.prefix}{name}": tensor for name, tensor in tensors.items()}
    return {FILE: write_tensors(out / FILE, named, options.dtype, said)}


def verify(weights: ExportedWeights, options: Options, out: Path) -> None:
    """Load the file into the library's own model and compare it bit by bit."""
    if weights.adapter is not None:
        model = model_without_memory(weights)
        prefix = options.prefix.removesuffix(".") or None
        model.load_lora_adapter(  # type: ignore[operator]
            str(out), prefix=prefix, weight_name=FILE
        )
        adapter, scales = _folded(weights.adapter, weights.scales)
        hold_adapter_to(adapter, scales, model, options.dtype, out)
        return
    model = weights.family.empty_model(weights.folder)
    state = {n.removeprefix(options.prefix): t for n, t in load_file(out / FILE).items()}
    model.load_state_dict(state, strict=False, assign=True)
    # Of tied weights the file holds the first alone.
    tied = getattr(model, "all_tied_weights_keys", {})
    held = {n: t for n, t in model.state_dict().items() if n not in tied or not t.is_meta}
    hold_to(weights.trained, held, options.dtype, out)


def _folded(adapter: Adapter, scales: Mapping[str, float]) -> tuple[Adapter, Mapping[str, float]]:
    """The same LoRA with the scale of each layer in its second factor, and with scales of 1."""
    if adapter.settings.get("use_dora"):  # its readers need the header anyway
        return adapter, scales
    settings = adapter.settings | {"lora_alpha": adapter.settings["r"], "use_rslora": False}
    settings["alpha_pattern"] = settings.get("rank_pattern", {})

    def folded(name: str, stored: Stored) -> Stored:
        layer, second, _ = name.partition(SECOND_FACTOR)
        if not second:
            return stored

        def read() -> torch.Tensor:
            return stored.read().float() * scales[layer]

        return Stored(stored.dtype, stored.shape, read)

    tensors = {name: folded(name, stored) for name, stored in adapter.tensors.items()}
    return Adapter(settings, tensors), dict.fromkeys(scales, 1.0)
