"""kohya: a LoRA in the format of sd-scripts, which ComfyUI, A1111 and Forge read by its names.

Each layer of the original model has `lora_down`, `lora_up` and its true alpha: readers scale by
alpha / rank, and use the rank if alpha is missing. Layers that are one layer in the original have
one LoRA with a block-diagonal lora_up, unless they share their first factor.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from zerotrain.errors import PipelineError
from zerotrain.export.formats import Options
from zerotrain.export.formats.diffusers_lora import verify_adapter
from zerotrain.export.formats.original import (
    FLUX_WIDTH,
    SLOTS,
    Slots,
    flux_width,
    layers_by_slot,
    sd3_slots,
    swap_halves,
)
from zerotrain.export.formats.tensors import LazyTensor, mismatch, write_tensors
from zerotrain.export.formats.weights import (
    Adapter,
    ExportedWeights,
    architecture,
    model_without_memory,
    network,
)
from zerotrain.models.families import Family
from zerotrain.models.families.pipelines import pipeline_class

FILE = "lora.safetensors"
DOWN, UP = "lora_A.weight", "lora_B.weight"
INSTEAD = "merge it: --to merged; or keep it: --to diffusers_lora or peft"


def write(weights: ExportedWeights, options: Options, out: Path) -> dict[str, str]:
    """Write the file, and return its sha256 by name."""
    adapter = weights.adapter
    assert adapter is not None
    slot_of = _slots(weights)
    _check_only_factors(adapter, weights)
    alphas = {layer: _alpha(weights, layer) for layer in adapter.layers}
    _check_single_alpha(alphas, weights)
    if weights.family.name == "flux":
        _check_readable(weights)
    tensors: dict[str, LazyTensor] = {}
    for slot, layers in layers_by_slot(weights.trained, slot_of).items():
        if not (trained := [layer for layer in layers if layer in alphas]):
            continue
        name = name_of(slot)
        tensors |= {f"{name}.{n}": t for n, t in _factors(weights, layers, slot_of).items()}
        alpha = torch.tensor(
            alphas[trained[0]] * (1 if _is_shared(adapter, layers) else len(layers))
        )
        tensors[f"{name}.alpha"] = LazyTensor(alpha.dtype, (), alpha.clone)
    header = weights.lineage() | architecture(weights, "/lora") | network(weights)
    return {FILE: write_tensors(out / FILE, tensors, options.dtype, header)}


def verify(weights: ExportedWeights, options: Options, out: Path) -> None:
    """Load the file with diffusers' own reader of kohya's names; compare factors and scales."""
    model = model_without_memory(weights)
    load(weights.family, model, out / FILE)
    if weights.family.name == "sdxl":
        assert weights.adapter is not None
        verify_adapter(weights.adapter, weights.scales, model, options.dtype, out / FILE)
    else:
        verify_folded(weights, model, options.dtype, out / FILE)


def _slots(weights: ExportedWeights) -> Slots:
    if weights.family.name not in SLOTS:
        raise PipelineError(
            f"--to kohya: its names for {weights.family.name} are not known here",
            hint=f"they are those of {', '.join(SLOTS)}; diffusers_lora and peft are for all",
        )
    return SLOTS[weights.family.name](weights.config(weights.part))


def _factors(
    weights: ExportedWeights, layers: tuple[str, ...], slot_of: Slots
) -> dict[str, LazyTensor]:
    """Return both factors of a layer that consists of these; some may have no adapter."""
    adapter = weights.adapter
    assert adapter is not None
    if len(layers) == 1:
        down, up = (adapter.tensors[f"{layers[0]}.{factor}"] for factor in (DOWN, UP))
        up = swap_halves(up) if slot_of(f"{layers[0]}.weight").swapped else up
        return {"lora_down.weight": down, "lora_up.weight": up}
    names = (f"{layer}.{DOWN}" for layer in layers)
    known = next(adapter.tensors[name] for name in names if name in adapter.tensors)
    rank, width = known.shape
    heights = [weights.trained[f"{layer}.weight"].shape[0] for layer in layers]

    def read(factor: str) -> list[torch.Tensor]:
        shapes = [(rank, width) if factor == DOWN else (height, rank) for height in heights]
        names = [f"{layer}.{factor}" for layer in layers]
        return [
            adapter.tensors[name].read() if name in adapter.tensors else torch.zeros(shape)
            for name, shape in zip(names, shapes, strict=True)
        ]

    if _is_shared(adapter, layers):
        return {
            "lora_down.weight": known,
            "lora_up.weight": LazyTensor(
                known.dtype, (sum(heights), rank), lambda: torch.cat(read(UP))
            ),
        }
    total = rank * len(layers)
    return {
        "lora_down.weight": LazyTensor(known.dtype, (total, width), lambda: torch.cat(read(DOWN))),
        "lora_up.weight": LazyTensor(
            known.dtype,
            (sum(heights), total),
            lambda: torch.block_diag(*read(UP)),  # type: ignore[no-untyped-call]
        ),
    }


def _is_shared(adapter: Adapter, layers: tuple[str, ...]) -> bool:
    """Return whether these share a first factor, as trained with `lora.fused_layers`: one LoRA."""
    if any(f"{layer}.{DOWN}" not in adapter.tensors for layer in layers):
        return False
    first, *others = (adapter.tensors[f"{layer}.{DOWN}"].read() for layer in layers)
    return all(torch.equal(first, other) for other in others)


def _alpha(weights: ExportedWeights, layer: str) -> float:
    """Return the alpha that a reader divides by the rank; for rsLoRA alpha * sqrt(rank)."""
    assert weights.adapter is not None
    rank = weights.adapter.tensors[f"{layer}.{DOWN}"].shape[0]
    return round(weights.scales[layer] * rank, 6)


def _check_single_alpha(alphas: Mapping[str, float], weights: ExportedWeights) -> None:
    """Reject several alphas: diffusers looks for those of attention layers under another name."""
    different = sorted(set(alphas.values()))
    if len(different) > 1:
        raise PipelineError(
            f"--to kohya: layers of {weights.folder} have several alphas, {different[0]:g} to "
            f"{different[-1]:g}, and diffusers would read one for all",
            hint=INSTEAD,
        )


def _check_only_factors(adapter: Adapter, weights: ExportedWeights) -> None:
    other = next((n for n in adapter.tensors if not n.endswith((DOWN, UP))), None)
    if other is None:
        return
    dora = "lora_magnitude_vector" in other
    raise PipelineError(
        f"--to kohya: {weights.folder} has {other}, "
        + (
            "and DoRA there is another function: ComfyUI divides by the norm of the base's weights "
            "alone"
            if dora
            else "which readers of kohya's names leave out"
        ),
        hint=INSTEAD,
    )


def _check_readable(weights: ExportedWeights) -> None:
    """Reject layers of Flux that diffusers ignores in a LoRA, or reads only at one width."""
    assert weights.adapter is not None
    blocks = ("transformer_blocks.", "single_transformer_blocks.")
    other = next((n for n in weights.adapter.layers if not n.startswith(blocks)), None)
    if other:
        raise PipelineError(
            f"--to kohya: of Flux's {other} diffusers reads no LoRA under kohya's names",
            hint=f"{INSTEAD}; or train without it: lora.target_modules",
        )
    ends = (".attn.to_q", ".attn.to_k", ".attn.to_v", ".proj_mlp")
    joined = (n for n in weights.adapter.layers if n.startswith(blocks[1]) and n.endswith(ends))
    first, width = next(joined, None), flux_width(weights)
    if first and width != FLUX_WIDTH:
        raise PipelineError(
            f"--to kohya: {first} is {width} wide, and diffusers reads such a layer only at "
            f"Flux's own width {FLUX_WIDTH}",
            hint=INSTEAD,
        )


def name_of(layer: str) -> str:
    """Return kohya's name of a layer of the original model's denoiser."""
    return "lora_unet_" + layer.replace(".", "_")


def load(family: Family, model: torch.nn.Module, file: Path) -> None:
    """Load a file into a family's denoiser.

    For SDXL, Flux and Qwen-Image, the pipelines' own lora_state_dict reads it. diffusers reads no
    such file of SD3; there its conversion of a whole SD3 decides which rows of a LoRA belong to
    which layer.
    """
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
