"""Layers of DiffSynth-Studio's Flux (its diffsynth/models/flux_dit.py) under diffusers' names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zerotrain.config.families import FAMILIES
from zerotrain.errors import PipelineError
from zerotrain.importers.imported_config import ImportedConfig
from zerotrain.importers.keys import DIFFSYNTH

QKV = ("to_q", "to_k", "to_v")
FUSED = ("a_to_qkv", "b_to_qkv", "to_qkv_mlp")
"""Layers that correspond to several here; both have query, key and value in this order."""


def _in_blocks(blocks: str, count: int, *layers: str) -> tuple[str, ...]:
    return tuple(f"{blocks}.{number}.{layer}" for number in range(count) for layer in layers)


SINGLE, DOUBLE = ("single_transformer_blocks", 38), ("transformer_blocks", 19)
"""Names and numbers of FLUX.1's blocks."""
LAYERS: Mapping[str, Sequence[str]] = {
    "a_to_qkv": _in_blocks(*DOUBLE, *(f"attn.{layer}" for layer in QKV)),
    "b_to_qkv": ("add_q_proj", "add_k_proj", "add_v_proj"),
    "to_qkv_mlp": _in_blocks(*SINGLE, *(f"attn.{layer}" for layer in QKV), "proj_mlp"),
    "a_to_out": ("to_out.0",),
    "b_to_out": ("to_add_out",),
    "ff_a.0": ("ff.net.0.proj",),
    "ff_a.2": ("ff.net.2",),
    "ff_b.0": ("ff_context.net.0.proj",),
    "ff_b.2": ("ff_context.net.2",),
    "norm1_a.linear": ("norm1.linear",),
    "norm1_b.linear": ("norm1_context.linear",),
    "norm.linear": ("norm.linear",),
    # Here the model's last layer is also called proj_out; DiffSynth-Studio's is final_proj_out.
    "proj_out": _in_blocks(*SINGLE, "proj_out"),
}
"""DiffSynth-Studio's names, and suffixes of the same layers' names here."""
EVERYWHERE: Mapping[str, Sequence[str]] = {"a_to_qkv": QKV, "to_qkv_mlp": (*QKV, "proj_mlp")}
"""Shorter suffixes if both are targets, as no other layers have these suffixes."""


def flux_targets(modules: Sequence[str]) -> list[str]:
    """Return the suffixes of these layers' names here; each must be in LAYERS."""
    both = EVERYWHERE.keys() <= {*modules}
    table = {**LAYERS, **EVERYWHERE} if both else LAYERS
    return list(dict.fromkeys(layer for module in modules for layer in table[module]))


DENOISERS = {"sdxl": "unet"}
"""Names of the denoiser in its pipelines, if not dit."""


def put_trained(arguments: dict[str, Any], result: ImportedConfig) -> None:
    """Check which model is trained: the denoiser, fully or through an adapter."""
    denoiser = DENOISERS.get(result.values.get("family", ""), "dit")
    whole, lora = arguments.get("trainable_models"), arguments.get("lora_base_model")
    if whole is not None and whole != denoiser:
        raise PipelineError(
            f"trainable_models: {whole!r} cannot be honoured: only the denoiser ({denoiser}) is "
            "trained",
            hint="`--skip trainable_models` trains the denoiser",
        )
    if whole is not None and lora is not None:
        raise PipelineError(
            "trainable_models and lora_base_model are both given",
            hint="train the model or an adapter to it: take one of them out",
        )
    if whole is not None:
        result.note("kept", "trainable_models", whole, "the denoiser, which is what is trained")
    elif lora is not None and lora != denoiser:
        raise PipelineError(
            f"lora_base_model is {lora}", hint=f"a LoRA is the denoiser's: {denoiser}"
        )


def put_lora(arguments: dict[str, Any], result: ImportedConfig) -> None:
    """Set the denoiser's adapter, and the weights that the training starts from."""
    base = arguments.get("lora_base_model")
    if rounded := arguments.pop("fp8_models", None):
        if not base:
            raise PipelineError(
                f"fp8_models: {rounded!r}: weights that are trained are not rounded to fp8",
                hint="`--skip fp8_models`; a launch preset with offload needs less memory",
            )
        result.note(
            "changed", "fp8_models", rounded,
            "frozen weights are not rounded to fp8: they take more memory, and the adapter is "
            "trained next to the weights themselves, not next to their rounded copy",
        )  # fmt: skip
    if base is None:
        names = ("lora_rank", "lora_target_modules")
        result.ignore_all(arguments, names, "no lora_base_model: no LoRA is trained")
    else:
        result.note(
            "kept", "lora_base_model", base, "the denoiser, which is what is trained", "lora"
        )
        rank = arguments.get("lora_rank", DIFFSYNTH["lora_rank"].default)
        if rank < 1:
            raise PipelineError(f"lora_rank is {rank}", hint="give a rank from 1 on")
        result.adopt(arguments, "lora_rank", "lora.rank", rank, "DiffSynth-Studio's default")
        result.assume("lora.alpha", float(rank), "DiffSynth-Studio's alpha is the rank")
        _put_targets(str(arguments.get("lora_target_modules", "")), result)
    resume = [n for n in ("resume_from_checkpoint", "lora_checkpoint") if n in arguments]
    for name in resume:
        result.keep(name, arguments[name], "resume_from_checkpoint")
    if resume:
        reason = "DiffSynth-Studio reads weights alone, and begins with a new optimizer"
        result.assume("phases.allow", ["moments"], reason)


def put_quantization(arguments: dict[str, Any], result: ImportedConfig) -> None:
    """Set the quantized weights: `MODEL:FILES:METHOD/EXCLUDED,LAYERS;...`."""
    name = "quant_options"
    given = arguments.pop(name, None)
    entries = [entry for entry in str(given or "").split(";") if entry.rpartition(":")[2]]
    family = result.values.get("family")
    if not entries or family is None:  # an unknown model is already among the problems
        return
    models = str(arguments.get("model_id_with_origin_paths") or "").split(",")
    part = FAMILIES[family].trained_part
    for entry in entries:
        model, _, wanted = entry.rpartition(":")
        method, _, excluded = wanted.partition("/")
        problem = (
            f"{model} is not the denoiser, and no other weights are quantized"
            if model not in models or not model.partition(":")[2].startswith(f"{part}/")
            else f"{method} is not offered"
            if method != "bitsandbytes_nf4"
            else "its model has layers in stacks, whose scales are quantized together"
            if family != "qwen_image"
            else "weights that are trained are not quantized"
            if not arguments.get("lora_base_model")
            else ""
        )
        if problem:
            raise PipelineError(
                f"{name}: {entry!r}: {problem}",
                hint=f"`--skip {name}` trains next to the weights themselves; it takes more memory",
            )
        result.keep(name, given, "base_model_precision", "nf4")
        if excluded:
            result.keep(name, given, "base_model_exclude_modules", excluded.split(","))


def _put_targets(given: str, result: ImportedConfig) -> None:
    """Set the layers that get an adapter."""
    name, ours = "lora_target_modules", "lora.target_modules"
    modules = [module.strip() for module in given.split(",") if module.strip()]
    if not modules:
        raise PipelineError(
            f"{name} names no layer, and those that DiffSynth-Studio would choose follow from its "
            "own code of the model",
            hint=f"name the layers: --{name} to_q,to_k,to_v,to_out.0",
        )
    if result.values.get("family") != "flux" or {*modules}.isdisjoint(LAYERS):
        result.keep(name, given, ours, modules)
        return
    if unknown := [module for module in modules if module not in LAYERS]:
        raise PipelineError(
            f"{name}: {unknown[0]} is no layer of Flux in DiffSynth-Studio",
            hint=f"known: {', '.join(LAYERS)}",
        )
    result.keep(name, given, ours, flux_targets(modules), "the same layers by diffusers' names")
    if fused := [module for module in modules if module in FUSED]:
        reason = f"{', '.join(fused)}: one layer each there, with one first factor"
        result.assume("lora.fused_layers", True, reason)
