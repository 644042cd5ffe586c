"""kohya: a LoRA as sd-scripts writes it, which ComfyUI, A1111 and Forge open by its names.

Each layer carries `lora_down`, `lora_up` and its true alpha: readers scale by alpha / rank, and
take alpha for the rank where it is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from zerotrain.errors import PipelineError
from zerotrain.families.pipelines import pipeline_class
from zerotrain.formats import Options, sdxl_names
from zerotrain.formats.diffusers_lora import hold_adapter_to
from zerotrain.formats.modelspec import architecture, network
from zerotrain.formats.tensors import Stored, write_tensors
from zerotrain.formats.weights import Adapter, ExportedWeights, model_without_memory

FILE = "lora.safetensors"
FACTORS = {"lora_A.weight": "lora_down.weight", "lora_B.weight": "lora_up.weight"}


def write(weights: ExportedWeights, options: Options, out: Path) -> dict[str, str]:
    """Write the file; its sha256 by name."""
    adapter = weights.adapter
    assert adapter is not None
    name_of = _names(weights)
    _refuse_other_tensors(adapter, weights)
    alphas = {layer: _alpha(weights, layer) for layer in adapter.layers}
    _refuse_several(alphas, weights)
    tensors = {}
    for layer in adapter.layers:
        kohya = "lora_unet_" + name_of(f"{layer}.weight").removesuffix(".weight").replace(".", "_")
        for own, theirs in FACTORS.items():
            tensors[f"{kohya}.{theirs}"] = adapter.tensors[f"{layer}.{own}"]
        alpha = torch.tensor(alphas[layer])
        tensors[f"{kohya}.alpha"] = Stored(alpha.dtype, (), alpha.clone)
    said = weights.lineage() | architecture(weights, "/lora") | network(weights)
    return {FILE: write_tensors(out / FILE, tensors, options.dtype, said)}


def verify(weights: ExportedWeights, options: Options, out: Path) -> None:
    """Load the file with diffusers' own reading of kohya's names; compare factors and scales."""
    pipeline = pipeline_class(weights.family.pipeline)  # type: ignore[attr-defined]
    model = model_without_memory(weights)
    state, alphas = pipeline.lora_state_dict(
        str(out), weight_name=FILE, unet_config=model.config, local_files_only=True
    )
    pipeline.load_lora_into_unet(state, network_alphas=alphas, unet=model)
    hold_adapter_to(weights, model, options.dtype, out / FILE)


def _sdxl(weights: ExportedWeights) -> Callable[[str], str]:
    return sdxl_names.unet_names(weights.config("unet"))


NAMES: Mapping[str, Callable[[ExportedWeights], Callable[[str], str]]] = {"sdxl": _sdxl}
"""Families whose names kohya has of its own, and who gives them."""


def _names(weights: ExportedWeights) -> Callable[[str], str]:
    if weights.family.name not in NAMES:
        raise PipelineError(
            f"--to kohya: its names for {weights.family.name} are not known here",
            hint=f"they are those of {', '.join(NAMES)}; diffusers_lora and peft are for all",
        )
    return NAMES[weights.family.name](weights)


def _alpha(weights: ExportedWeights, layer: str) -> float:
    """What a reader divides by the rank: the true alpha, by rsLoRA alpha * sqrt(rank)."""
    assert weights.adapter is not None
    rank = weights.adapter.tensors[f"{layer}.lora_A.weight"].shape[0]
    return round(weights.scales[layer] * rank, 6)


def _refuse_several(alphas: Mapping[str, float], weights: ExportedWeights) -> None:
    """Of attention layers diffusers looks for an alpha of their own under another name."""
    found = sorted(set(alphas.values()))
    if len(found) > 1:
        raise PipelineError(
            f"--to kohya: layers of {weights.folder} have several alphas, {found[0]:g} to "
            f"{found[-1]:g}, and diffusers would read one for all",
            hint="merge it: --to merged; or keep it: --to diffusers_lora or peft",
        )


def _refuse_other_tensors(adapter: Adapter, weights: ExportedWeights) -> None:
    other = next((n for n in adapter.tensors if not n.endswith(tuple(FACTORS))), None)
    if other:
        raise PipelineError(
            f"--to kohya: {weights.folder} has {other}, which readers of kohya's names leave out",
            hint="merge it: --to merged; or keep it: --to diffusers_lora or peft",
        )
