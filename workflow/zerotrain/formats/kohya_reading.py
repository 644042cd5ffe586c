"""A file with kohya's names, as diffusers reads it into a denoiser.

SDXL's, Flux's and Qwen-Image's by the pipelines' own lora_state_dict. diffusers reads none of SD3;
there its conversion of a whole SD3 says which rows of a LoRA belong to which of its layers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from zerotrain.families import Family
from zerotrain.families.pipelines import pipeline_class
from zerotrain.formats.mmdit_names import sd3_places
from zerotrain.formats.original import layers_by_place
from zerotrain.formats.tensors import otherwise
from zerotrain.formats.weights import ExportedWeights


def name_of(layer: str) -> str:
    """kohya's name of a layer of the original model's denoiser."""
    return "lora_unet_" + layer.replace(".", "_")


def load(family: Family, model: torch.nn.Module, file: Path) -> None:
    """Load a file into a family's denoiser."""
    pipeline = pipeline_class(family.pipeline)  # type: ignore[attr-defined]
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


def hold_folded_to(
    weights: ExportedWeights, model: torch.nn.Module, dtype: torch.dtype, where: Path
) -> None:
    """Hold an adapter into whose factors a reader has put the scale to the trained one.

    Layers that are one in the original come back with zeros for each other, and with the others'
    rows of the first factor; both are of no effect.

    Raises:
        PipelineError: naming the first layer that differs by more than the product's rounding.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapter = weights.adapter
    assert adapter is not None
    eps = torch.finfo(dtype).eps
    found = {n: m for n, m in model.named_modules() if isinstance(m, BaseTunerLayer)}
    for layer in sorted(found.keys() | set(adapter.layers)):
        if layer not in found:
            raise otherwise(f"{layer} is absent in what the library loads", where)
        own: Any = found[layer]
        (name,) = own.lora_A
        loaded = _effective(own.lora_A[name].weight, own.lora_B[name].weight)
        if layer not in adapter.layers:
            if loaded[1].numel():
                raise otherwise(f"{layer} is surplus in what the library loads", where)
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
                raise otherwise(f"{layer} reads back otherwise than it was written", where)


def _sd3_state(tensors: dict[str, torch.Tensor], model: Any) -> dict[str, torch.Tensor]:
    """A LoRA's tensors by diffusers' names, with its scale in them."""
    from diffusers.loaders.single_file_utils import convert_sd3_transformer_checkpoint_to_diffusers

    place_of = sd3_places(model.config)
    owners = {
        layer: name_of(place)
        for place, layers in layers_by_place(model.state_dict(), place_of).items()
        for layer in layers
    }
    rows: dict[str, int] = {}
    for name, parameter in model.state_dict().items():
        place = place_of(name).name
        rows[place] = rows.get(place, 0) + parameter.shape[0]
    # The conversion cuts and moves rows: second factors go through it in the place of weights, and
    # what has no LoRA as rows without elements.
    whole = {
        place: tensors.get(
            f"{name_of(place.removesuffix('.weight'))}.lora_up.weight", torch.empty(count, 0)
        )
        for place, count in rows.items()
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
    """The factors without what a zero column of the second one takes away."""
    kept = second.flatten(2).any(-1).any(0) if second.dim() > 2 else second.any(0)
    return first[kept], second[:, kept]


def _halves(scale: float) -> tuple[float, float]:
    """A scale as diffusers divides it between the factors (lora_conversion_utils)."""
    down, up = scale, 1.0
    while down * 2 < up:
        down, up = down * 2, up / 2
    return down, up
