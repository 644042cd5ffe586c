"""SimpleTuner's base model, how it is stored, and its adapter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerotrain.errors import PipelineError
from zerotrain.importers.files import find_file, load_json
from zerotrain.importers.imported_config import ImportedConfig
from zerotrain.importers.key_values import assume_defaults, put_row, read_keys
from zerotrain.importers.keys import LYCORIS, SIMPLETUNER, SIMPLETUNER_VALUES
from zerotrain.importers.program import name_of, with_autoencoder

_VALUES = SIMPLETUNER_VALUES
FLAVOURS: dict[str, dict[str, str]] = _VALUES["flavours"]
FLUX_TARGETS: dict[str, list[str]] = _VALUES["flux_targets"]
EXCLUDED: dict[str, list[str]] = _VALUES["excluded"]
_IMAGE, _TEXT = _VALUES["lora_targets"]["image"], _VALUES["lora_targets"]["text"]
ASSISTANT = "ostris/FLUX.1-schnell-training-adapter"
SDXL_VAE = "madebyollin/sdxl-vae-fp16-fix"
"""SDXL's autoencoder if none is named."""
DEFAULT = "SimpleTuner's default"
QUANTO = ("int8-quanto", "int4-quanto", "int2-quanto")
FULL_RANK = 10000
"""A rank beyond which LyCORIS and peft train both factors in full, without a scale."""
LYCORIS_FILE = "lycoris_config"


def put_family(arguments: dict[str, Any], result: ImportedConfig) -> None:
    """Set the family."""
    family = arguments.get("model_family")
    if family is None:
        return
    if family.casefold() not in FLAVOURS:
        raise PipelineError(f"model_family is {family}", hint=f"families: {', '.join(FLAVOURS)}")
    result.keep("model_family", family, "family", family.casefold())


def put_base(arguments: dict[str, Any], result: ImportedConfig) -> None:
    """Set the model by its name or its flavour, and its autoencoder.

    Raises:
        PipelineError: the flavour does not train from text alone, or has an assistant LoRA.
    """
    family, given = result.values.get("family"), arguments.get("pretrained_model_name_or_path")
    flavour = arguments.get("model_flavour")
    flavours = FLAVOURS.get(str(family), {})
    if family == "flux" and flavour == "kontext":
        raise PipelineError(
            "model_flavour is kontext, which SimpleTuner trains by a forward of its own: reference "
            "tokens have the timestep 0, and text tokens the mean over all image tokens; here, as "
            "in diffusers' pipeline, all tokens of a sample have one timestep",
            hint="to train Kontext as its pipeline runs it, write a run with base: "
            "black-forest-labs/FLUX.1-Kontext-dev and data.conditioning_images; "
            "docs/conditioning.md has an example",
        )
    if flavour is not None and family is not None and flavour not in flavours:
        raise PipelineError(
            f"model_flavour is {flavour}, which does not train from text alone",
            hint=f"flavours that do: {', '.join(flavours)}",
        )
    _check_assistant(arguments, result)
    base = given or flavours.get(next(iter(flavours), "") if flavour is None else flavour)
    vae = arguments.get("pretrained_vae_model_name_or_path")
    if base is None:
        return
    whole = base
    if vae not in (None, "", base) and family is not None:
        whole = with_autoencoder(base, str(vae), family)
        result.keep("pretrained_vae_model_name_or_path", vae, "base", whole)
    elif vae is None and family == "sdxl" and ":" not in base:
        whole = with_autoencoder(base, SDXL_VAE, family)
    if given is not None:
        result.keep("pretrained_model_name_or_path", given, "base", whole)
    if flavour is not None:
        result.keep("model_flavour", flavour, "base", whole)
    if given is None and flavour is None:
        result.assume("base", whole, f"SimpleTuner's default of {family}")
    elif whole != base and vae is None:
        result.note(
            "default", "base", None, f"SimpleTuner's autoencoder of SDXL, {SDXL_VAE}", "base"
        )
    result.assume("run", name_of(base), "named by its model")


def _check_assistant(arguments: dict[str, Any], result: ImportedConfig) -> None:
    """Refuse a LoRA of schnell, into which SimpleTuner fuses an adapter, unless that is disabled.

    Source: simpletuner/helpers/models/flux/model.py, _maybe_load_assistant_lora.
    """
    name = "disable_assistant_lora"
    off = arguments.pop(name, None)
    model = (result.values.get("family"), arguments.get("model_flavour"))
    if model == ("flux", "schnell") and arguments.get("model_type") == "lora" and not off:
        raise PipelineError(
            "model_flavour: SimpleTuner trains a LoRA of schnell next to an assistant LoRA, "
            f"{ASSISTANT}; here the base is trained as it is",
            hint=f"fuse that LoRA into the base first, and set {name}: true",
        )
    if off is not None:
        result.note("kept", name, off, "no assistant LoRA is loaded", "base")


def put_adapter(arguments: dict[str, Any], path: Path | None, result: ImportedConfig) -> None:
    """Set `lora:`, or `peft:` by LyCORIS' configuration file."""
    if arguments.get("model_type") != "lora":
        return
    if arguments.get("lora_type") == "lycoris":
        own = [n for n in arguments if SIMPLETUNER[n].ours.startswith("lora.")]
        result.ignore_all(arguments, own, "lycoris_config says it")
        file = arguments.pop(LYCORIS_FILE, "config/lycoris_config.json")
        result.note("kept", "lora_type", arguments.pop("lora_type"), "see lycoris_config", "peft")
        result.note("kept", LYCORIS_FILE, file, "read below", "peft")
        result.attempt(_read_lycoris, load_json(find_file(file, path)), str(path), result)
        return
    if "lora_type" in arguments:
        result.note("kept", "lora_type", arguments.pop("lora_type"), "", "lora")
    result.ignore_all(arguments, [LYCORIS_FILE], "belongs to lora_type lycoris")
    _put_lora_targets(arguments, result)
    assume_defaults(arguments, SIMPLETUNER, result, "lora.")


def _put_lora_targets(arguments: dict[str, Any], result: ImportedConfig) -> None:
    """Set the layers; Flux has names for sets of layers."""
    name, ours = "flux_lora_target", "lora.target_modules"
    if result.values.get("family") != "flux":
        result.ignore_all(arguments, [name], "a key of flux")
        result.assume(ours, _IMAGE, DEFAULT)
        return
    given = arguments.get(name)
    targets = FLUX_TARGETS.get(given or SIMPLETUNER[name].default)
    if targets is None:
        raise PipelineError(
            f"{name} is {given}",
            hint=f"known: {', '.join(FLUX_TARGETS)}; or name layers in lora.target_modules",
        )
    if given is None:
        result.assume(ours, targets, f"{DEFAULT}, all")
    else:
        result.keep(name, given, ours, targets)


def put_precision(arguments: dict[str, Any], result: ImportedConfig) -> None:
    """Set how the frozen base is stored.

    Raises:
        PipelineError: the weights are trained, or a low-bit method is not supported.
    """
    name = "base_model_precision"
    given, via = arguments.pop(name, None), arguments.get("quantize_via")
    in_memory = arguments.pop("ramtorch", False)
    dtype = arguments.pop("base_model_default_dtype", None)
    result.ignore_all(arguments, ["quantize_via"], "the device on which weights are quantized")
    if in_memory:
        result.drop("ramtorch", in_memory, "saves memory there; here a launch preset does")
    if given == "no_change":
        result.note("kept", name, given, "", "base")
    if given in (None, "no_change"):
        return
    if arguments.get("model_type") != "lora":
        raise PipelineError(
            f"{name}: {given!r}: weights that are trained are not quantized",
            hint="set it to no_change; a launch preset with offload needs less memory",
        )
    plain = arguments.get("lora_type", "standard") == "standard"
    family = result.values.get("family")
    if given in QUANTO and in_memory:
        result.ignore(name, given, "SimpleTuner quantizes no model whose layers ramtorch holds")
    elif given == "nf4-bnb" and plain:
        result.keep(name, given, name, "nf4")
    elif given in QUANTO and plain and family in EXCLUDED and via != "pipeline":
        result.keep(name, given, name)
        if EXCLUDED[family]:
            result.assume("base_model_exclude_modules", EXCLUDED[family], "in SimpleTuner's code")
        if dtype == "fp32":
            result.note("changed", "base_model_default_dtype", dtype,
                      "scales of quantized weights are bf16, not fp32", name)  # fmt: skip
    elif "8" in given:
        result.note(
            "changed", name, given,
            "the frozen base is not quantized: it takes more memory, and the adapter is trained "
            "next to the weights themselves, not next to their rounded copy",
        )  # fmt: skip
    else:
        raise PipelineError(
            f"{name}: {given!r}: of few bits there are nf4-bnb and, except for SDXL, int4-quanto "
            "and int2-quanto, under a standard LoRA; next to weights that are quantized otherwise "
            "another adapter is learned",
            hint=f"`--skip {name}` trains the adapter next to the weights themselves; "
            "it takes more memory, for which there is offload",
        )


def _read_lycoris(config: Mapping[str, Any], where: str, result: ImportedConfig) -> None:
    """Set `peft:` from LyCORIS' configuration: its LoKr, trained with peft's equivalent.

    Sources: lycoris/modules/lokr.py and peft/tuners/lokr/layer.py, both with `factorization`, and
    peft's init_weights "lycoris".
    """
    flat = read_keys({LYCORIS_FILE: config}, LYCORIS, where, result)
    found = {key.removeprefix(f"{LYCORIS_FILE}."): value for key, value in flat.items()}
    algorithm = found.get("algo")
    if algorithm != "lokr":
        raise PipelineError(
            f"{where}: {LYCORIS_FILE}.algo is {algorithm}", hint="lokr is trained as peft's LoKr"
        )
    modules = found.get("apply_preset.target_module", [])
    if modules != ["Attention"]:
        raise PipelineError(
            f"{where}: {LYCORIS_FILE}.apply_preset.target_module is {modules}",
            hint="Attention alone is known; name other layers in peft.target_modules",
        )
    factor = found.get("factor", -1)
    own = found.get("apply_preset.module_algo_map", {}).get("Attention", {})
    if {**own, "factor": factor} != {"factor": own.get("factor", factor)}:
        raise PipelineError(
            f"{where}: {LYCORIS_FILE}.apply_preset.module_algo_map gives Attention {own}",
            hint=f"factor {factor} holds for all layers here",
        )
    rank, alpha = found.get("linear_dim", FULL_RANK), found.get("linear_alpha", 1)
    full = found.get("full_matrix", False) or rank >= FULL_RANK
    family = result.values.get("family", "sdxl")
    layers = _IMAGE if family == "sdxl" else [*_IMAGE, *_TEXT]  # diffusers' class Attention
    rows = {key.removeprefix(f"{LYCORIS_FILE}."): row for key, row in LYCORIS.items()}
    put_row(rows["algo"], algorithm, result)
    for name, given, whole in (
        ("linear_dim", rank, "both factors whole"),
        ("linear_alpha", alpha, "LyCORIS scales whole factors by 1"),
    ):
        value, reason = (FULL_RANK, whole) if full else (given, "")
        result.keep(rows[name].name, given, rows[name].ours, value, reason)
    put_row(rows["factor"], factor, result)
    if found.get("decompose_both"):
        put_row(rows["decompose_both"], True, result)
    row = rows["apply_preset.target_module"]
    result.keep(row.name, modules, row.ours, layers, "the linear layers of Attention")
    result.assume("peft.init_weights", "lycoris", "LyCORIS' own first values")
