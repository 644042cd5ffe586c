"""Reading of a file with kohya's names into a denoiser, as diffusers does.

For SDXL, Flux and Qwen-Image, the pipelines' own lora_state_dict reads it. diffusers reads no such
file of SD3; there its conversion of a whole SD3 decides which rows of a LoRA belong to which layer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from zerotrain.export.formats.original import layers_by_slot, sd3_slots
from zerotrain.export.formats.tensors import mismatch
from zerotrain.export.formats.weights import ExportedWeights
from zerotrain.models.families import Family
from zerotrain.models.families.pipelines import pipeline_class


def name_of(layer: str) -> str:
    """Return kohya's name of a layer of the original model's denoiser."""
    return "lora_unet_" + layer.replace(".", "_")


def load(family: Family, model: torch.nn.Module, file: Path) -> None:
    """Load a file into a family's denoiser."""
    pipeline = pipeline_class(family.spec.pipeline)
    if family.name == "sdxl":
        state, alphas = pipeline.lora_state_dict(
            str(file.parent), weight_name=file.name, unet_config=model.config, local_files_only=True
        )
        pipeline.load_lora_into_unet(state, network_alphas=alphas, unet=model)
        return
    if family.name == "sd3":
        state = _sd3_state(load_file(file), model)
    else:
        state = pipeline.lora_state_dict(
            str(file.parent), weight_name=file.name, local_files_only=True
        )
    model.load_lora_adapter(state, prefix="transformer")  # type: ignore[operator]


def verify_folded(
    weights: ExportedWeights, model: torch.nn.Module, dtype: torch.dtype, where: Path
) -> None:
    """Compare an adapter, whose factors a reader has scaled, with the trained one.

    Layers that are one layer in the original are read with zeros for each other, and with the
    others' rows of the first factor; both have no effect.

    Raises:
        PipelineError: a layer differs by more than rounding; the first is named.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapter = weights.adapter
    assert adapter is not None
    eps = torch.finfo(dtype).eps
    layers = {n: m for n, m in model.named_modules() if isinstance(m, BaseTunerLayer)}
    for layer in sorted(layers.keys() | set(adapter.layers)):
        if layer not in layers:
            raise mismatch(f"{layer} is absent in what the library loads", where)
        own: Any = layers[layer]
        (name,) = own.lora_A
        loaded = _effective(own.lora_A[name].weight, own.lora_B[name].weight)
        if layer not in adapter.layers:
            if loaded[1].numel():
                raise mismatch(f"{layer} is surplus in what the library loads", where)
            continue
        first, second = (
            adapter.tensors[f"{layer}.lora_{letter}.weight"].read().to(dtype).float()
            for letter in "AB"
        )
        down, up = _halves(weights.scales[layer])
        for one, other in zip(loaded, _effective(first * down, second * up), strict=True):
            if one.shape != other.shape or not torch.allclose(
                one.float(), other, rtol=2 * eps, atol=torch.finfo(dtype).tiny
            ):
                raise mismatch(f"{layer} reads back with other values than were written", where)


def _sd3_state(tensors: dict[str, torch.Tensor], model: Any) -> dict[str, torch.Tensor]:
    """Return a LoRA's tensors by diffusers' names, multiplied by its scale."""
    from diffusers.loaders.single_file_utils import convert_sd3_transformer_checkpoint_to_diffusers

    slot_of = sd3_slots(model.config)
    owners = {
        layer: name_of(slot)
        for slot, layers in layers_by_slot(model.state_dict(), slot_of).items()
        for layer in layers
    }
    rows: dict[str, int] = {}
    for name, parameter in model.state_dict().items():
        slot = slot_of(name).name
        rows[slot] = rows.get(slot, 0) + parameter.shape[0]
    # The conversion splits and moves rows: second factors are passed to it instead of weights, and
    # rows without elements for layers without a LoRA.
    whole = {
        slot: tensors.get(
            f"{name_of(slot.removesuffix('.weight'))}.lora_up.weight", torch.empty(count, 0)
        )
        for slot, count in rows.items()
    }
    state = {}
    for name, up in convert_sd3_transformer_checkpoint_to_diffusers(whole).items():
        if not up.numel():
            continue
        layer = name.removesuffix(".weight")
        down = tensors[f"{owners[layer]}.lora_down.weight"]
        alpha = tensors.get(f"{owners[layer]}.alpha", torch.tensor(len(down)))
        scales = _halves(alpha.item() / len(down))
        for letter, factor, scale in zip("AB", (down, up), scales, strict=True):
            state[f"transformer.{layer}.lora_{letter}.weight"] = factor * scale
    return state


def _effective(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the factors without the ranks for which the second one has only zeros."""
    kept = second.flatten(2).any(-1).any(0) if second.dim() > 2 else second.any(0)
    return first[kept], second[:, kept]


def _halves(scale: float) -> tuple[float, float]:
    """Split a scale between the factors as diffusers does (lora_conversion_utils)."""
    down, up = scale, 1.0
    while down * 2 < up:
        down, up = down * 2, up / 2
    return down, up
