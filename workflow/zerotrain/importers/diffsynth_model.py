"""DiffSynth-Studio's base model, its training loss, its inputs besides captions, and its adapter.

The parts of a model (--model_id_with_origin_paths) have the same form as in `base`
(zerotrain.models.base_places), with parts as folders in diffusers' layout.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from zerotrain.config.families import FAMILIES as OURS
from zerotrain.errors import PipelineError
from zerotrain.importers.imported_config import ImportedConfig
from zerotrain.importers.key_values import put_code, put_row, put_rows
from zerotrain.importers.keys import DIFFSYNTH, DIFFSYNTH_VALUES
from zerotrain.importers.program import put_run
from zerotrain.models.families.conditioning import IMAGE_EMBEDDER

FAMILIES: Mapping[str, str] = DIFFSYNTH_VALUES["families"]
"""Prefixes of model names in hub ids, and our families."""
IN_BF16 = ("qwen_image", "flux")
"""Families whose models it loads in bf16."""
PLAIN = "Qwen/Qwen-Image:model_index.json"
"""Turns an editing model into one that reads only captions, as in training without images."""


def put_model(
    prepare: list[dict[str, Any]],
    arguments: dict[str, Any],
    result: ImportedConfig,
    where: str,
    *,
    whole: bool,
) -> None:
    """Set the base; with `whole`, for commands without a denoiser, the whole repository."""
    name = "model_id_with_origin_paths"
    parts = [a[name] for a in (*prepare, arguments) if name in a]
    given = ",".join(parts) or arguments.get("model_paths")
    if given is None:
        raise PipelineError(f"{where}: no --{name}", hint="paste the whole command line")
    base = _whole_repository(name, str(given), result) if whole else str(given)
    repo = base if whole else str(arguments.get(name, given)).partition(":")[0]
    model = repo.rpartition("/")[2].casefold()
    family = next((f for start, f in FAMILIES.items() if model.startswith(start)), None)
    if family is None:
        raise PipelineError(
            f"{where}: {repo} is of no family that zerotrain trains",
            hint=f"families: {', '.join(sorted(set(FAMILIES.values())))}",
        )
    if parts and not whole:
        base = ",".join(map(_part, base.split(",")))
        if re.match(EDITS, model) and not arguments.get(NAME):
            base += f",{PLAIN}"
        reason = "the same parts in diffusers' layout" if base != given else ""
        if len(parts) > 1:
            reason = "the parts of both commands are one model"
        for part in parts:
            result.keep(name, part, "base", base, reason)
    elif not whole:
        result.keep("model_paths", given, "base")
    result.assume("family", family, f"by its name, {repo}")
    # Redux's tokens follow zeros instead of a caption.
    read = "redux" if REDUX in str(arguments.get(NAME, "")) else "captions"
    put_code(DIFFSYNTH_VALUES["code"], family, result, read)
    put_run(arguments.get("output_path"), repo, result, "output_path")
    result.attempt(put_inputs, arguments, model, result)


def _whole_repository(name: str, parts: str, result: ImportedConfig) -> str:
    repositories = {part.partition(":")[0] for part in parts.split(",")}
    if len(repositories) != 1:
        raise PipelineError(
            f"{name}: the encoders are of {' and '.join(sorted(repositories))}, and nothing names "
            "the denoiser",
            hint="paste the sft:train command as well",
        )
    base = repositories.pop()
    result.keep(name, parts, "base", base, "the whole repository: the phase needs its denoiser")
    return base


def _part(part: str) -> str:
    """Return PLACE:FILES in the form of `base`."""
    place, colon, files = part.rpartition(":")
    for original, ours in DIFFSYNTH_VALUES["original_files"].items():
        if re.fullmatch(original, files):
            return f"{place}{colon}{ours}"
    return part


NAME, FLAG = "extra_inputs", "zero_cond_t"
EDITS, FILLS = r"(qwen|firered)-image-edit", r"flux\.1-fill"
ONE_IMAGE, NEW_TIMESTEP = "qwen-image-edit", "qwen-image-edit-2511"
"""The editing models that read one image, and that see conditioning images without noise.

Of all scripts in examples/qwen_image at fed7b18f only those of Edit-2511 pass --zero_cond_t; those
of FireRed-Image-Edit-1.0 and -1.1, and docs/en/Model_Details/Qwen-Image.md, do not mention it."""
REDUX = "flux_redux_image"
SIDE = 1024
"""It scales edited images to the area of this square, whatever the trained size."""


def input_columns(arguments: Mapping[str, Any]) -> list[str]:
    """Return the columns of the inputs next to captions."""
    return [word.strip() for word in str(arguments.get(NAME, "")).split(",") if word.strip()]


def put_inputs(arguments: Mapping[str, Any], model: str, result: ImportedConfig) -> None:
    """Set the columns of conditioning images.

    Args:
        arguments: The flags of the training.
        model: The name of its denoiser, without the owner, in lower case.
        result: Receives the columns; has the family and the resolution.

    Raises:
        PipelineError: inputs are not conditioning images, or the model does not read them or lacks
            required ones.
    """
    columns = input_columns(arguments)
    table = DIFFSYNTH_VALUES["inputs"]
    known = next((one for one in table if {*one["columns"]} == {*columns}), None)
    if columns and (known is None or known["family"] != result.values.get("family")):
        raise PipelineError(
            f"{NAME}: {','.join(columns)!r} cannot be honoured: no conditioning images that a base "
            "reads here",
            hint="taken are " + "; ".join(",".join(one["columns"]) for one in table)
            + f"; `--skip {NAME}` imports the rest, if the training is meant without them",
        )  # fmt: skip
    if known is not None and not re.match(known["bases"], model):
        raise PipelineError(
            f"{NAME}: {','.join(columns)} belongs to another model than {model}",
            hint="name the base that reads these images",
        )
    if known is None and re.match(FILLS, model):
        raise PipelineError(
            f"{NAME}: {model} without an image and a mask would be trained to fill all of it",
            hint=f"--{NAME} flux_fill_image,flux_fill_mask names the columns of both",
        )
    if known is not None and REDUX in columns and IMAGE_EMBEDDER not in result.values["base"]:
        raise PipelineError(
            f"{NAME}: {REDUX} is read by image_encoder and image_embedder, and the base has none",
            hint="add black-forest-labs/FLUX.1-Redux-dev:image_encoder/model.safetensors and "
            "black-forest-labs/FLUX.1-Redux-dev:image_embedder/diffusion_pytorch_model.safetensors",
        )
    _check_timestep(bool(arguments.get(FLAG)), model, result)
    if known is None:
        return
    ours = "data.conditioning_columns"
    result.keep(NAME, arguments[NAME], ours, known["columns"])
    if known["columns"] == ["edit_image"]:
        _put_edit(arguments, model, result)
    if known["columns"] == [REDUX]:
        result.note(
            "changed", REDUX, None,
            "its centre square, at the trained size, is scaled to 384 x 384 and normalised in "
            "float32; DiffSynth-Studio squeezes the whole image and normalises it in bf16",
        )  # fmt: skip


def _check_timestep(given: bool, model: str, result: ImportedConfig) -> None:
    """Check the flag against the model, whose config.json has it here."""
    if given != model.startswith(NEW_TIMESTEP):
        there = "it" if given else f"--{FLAG}"
        raise PipelineError(
            f"{FLAG}: {model} is trained {'with' if given else 'without'} {there}, and its "
            f"config.json says {'nothing of it' if given else 'that it has it'}",
            hint=f"{'remove' if given else 'give'} --{FLAG}: it belongs to Qwen-Image-Edit-2511",
        )
    if given:
        put_row(DIFFSYNTH[FLAG], True, result)


def _put_edit(arguments: Mapping[str, Any], model: str, result: ImportedConfig) -> None:
    """Report differences in scale; refuse a table whose cells the model cannot read."""
    table = str(arguments.get("dataset_metadata_path", ""))
    if model == ONE_IMAGE:
        # In a CSV a cell is one file name there, so the prompt is for one image.
        listed = "where a cell is a list, DiffSynth-Studio takes the prompt of Qwen-Image-Edit-2509"
        reasons = [] if table.endswith(".csv") else [listed]
    else:
        if table.endswith(".csv"):
            raise PipelineError(
                f"dataset_metadata_path: {table} holds no lists, and of a single edit_image "
                f"DiffSynth-Studio makes the prompt of Qwen-Image-Edit, not that of {model}",
                hint="give a .json or .jsonl whose edit_image is a list, also of one image",
            )
        reasons = [
            "the text encoder's copy is scaled by diffusers' filter, Lanczos instead of cubic"
        ]
    side = result.values.get("train.resolution", SIDE)
    if side != SIDE:
        reasons.append(f"scaled to {side} x {side}, as the image is, instead of {SIDE} x {SIDE}")
    if reasons:
        result.note("changed", "edit_image", None, "; ".join(reasons))


FUSED = ("a_to_qkv", "b_to_qkv", "to_qkv_mlp")
"""Layers that correspond to several here; both have query, key and value in this order."""


def _in_blocks(names: Sequence[str]) -> tuple[str, ...]:
    """Return these names in each of FLUX.1's 38 single or 19 double blocks."""
    if "*" not in names[0]:
        return tuple(names)
    count = 38 if names[0].startswith("single_") else 19
    return tuple(name.replace("*", str(number)) for number in range(count) for name in names)


LAYERS = {name: _in_blocks(ours) for name, ours in DIFFSYNTH_VALUES["flux_layers"].items()}
"""DiffSynth-Studio's names, and suffixes of the same layers' names here."""
EVERYWHERE: Mapping[str, Sequence[str]] = DIFFSYNTH_VALUES["flux_layers_everywhere"]


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
        put_row(DIFFSYNTH["trainable_models"], whole, result)
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
    if base is not None:
        result.note(
            "kept", "lora_base_model", base, "the denoiser, which is what is trained", "lora"
        )
        rank = arguments.get("lora_rank", DIFFSYNTH["lora_rank"].default)
        if rank < 1:
            raise PipelineError(f"lora_rank is {rank}", hint="give a rank from 1 on")
        put_rows({**arguments}, DIFFSYNTH, result, "lora_rank")
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
    part = OURS[family].trained_part
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
