"""SimpleTuner's base model, and its adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zerotrain.errors import PipelineError
from zerotrain.importers.arguments import name_of, with_autoencoder
from zerotrain.importers.files import find_file, load_json
from zerotrain.importers.imported_config import ImportedConfig
from zerotrain.importers.keys import SIMPLETUNER
from zerotrain.importers.lycoris import read_lycoris

FLAVOURS = {
    "sdxl": {
        None: "stabilityai/stable-diffusion-xl-base-1.0",
        "base-1.0": "stabilityai/stable-diffusion-xl-base-1.0",
        "base-0.9": "stabilityai/stable-diffusion-xl-base-0.9",
    },
    "sd3": {
        None: "stabilityai/stable-diffusion-3.5-medium",
        "medium": "stabilityai/stable-diffusion-3.5-medium",
        "large": "stabilityai/stable-diffusion-3.5-large",
    },
    "flux": {
        None: "black-forest-labs/FLUX.1-Krea-dev",
        "krea": "black-forest-labs/FLUX.1-Krea-dev",
        "dev": "black-forest-labs/FLUX.1-dev",
        "schnell": "black-forest-labs/FLUX.1-schnell",
    },
    "qwen_image": {
        None: "Qwen/Qwen-Image-2512",
        "v1.0": "Qwen/Qwen-Image",
        "v2.0": "Qwen/Qwen-Image-2512",
    },
}
"""The model of each model_flavour that trains from text alone; None: the default flavour."""

KONTEXT = "kontext"

ASSISTANT = "ostris/FLUX.1-schnell-training-adapter"

SDXL_VAE = "madebyollin/sdxl-vae-fp16-fix"
"""SDXL's autoencoder if none is named."""

LORA_LAYERS = ["to_k", "to_q", "to_v", "to_out.0"]

FAMILIES = {"sdxl": "sdxl", "sd3": "sd3", "qwen_image": "qwen_image", "flux": "flux"}

_IMAGE = ["to_k", "to_q", "to_v", "to_out.0"]

_TEXT = ["add_k_proj", "add_q_proj", "add_v_proj", "to_add_out"]

_TEXT_FFS = ["ff_context.net.0.proj", "ff_context.net.2"]

_FFS = ["ff.net.0.proj", "ff.net.2", *_TEXT_FFS, "proj_mlp", "proj_out"]

FLUX_TARGETS = {
    "all": [*_IMAGE, *_TEXT],
    "context": _TEXT,
    "context+ffs": [*_TEXT, *_TEXT_FFS],
    "all+ffs": [*_IMAGE, *_TEXT, *_FFS],
    "ai-toolkit": [
        *_IMAGE, *_TEXT, *_FFS, "norm.linear", "norm1.linear", "norm1_context.linear",
    ],
    "tiny": ["single_transformer_blocks.7.proj_out", "single_transformer_blocks.20.proj_out"],
    "nano": ["single_transformer_blocks.7.proj_out"],
}  # fmt: skip
"""simpletuner/helpers/models/flux/model.py, without the names of its fused layers."""


def put_family(arguments: dict[str, Any], result: ImportedConfig) -> None:
    family = arguments.get("model_family")
    if family is None:
        return
    if family.casefold() not in FAMILIES:
        raise PipelineError(f"model_family is {family}", hint=f"families: {', '.join(FAMILIES)}")
    result.keep("model_family", family, "family", FAMILIES[family.casefold()])


def put_base(arguments: dict[str, Any], result: ImportedConfig) -> None:
    """Set the model by its name or its flavour, and its autoencoder.

    Raises:
        PipelineError: the flavour does not train from text alone, or has an assistant LoRA.
    """
    family, given = result.values.get("family"), arguments.get("pretrained_model_name_or_path")
    flavour = arguments.get("model_flavour")
    flavours = FLAVOURS.get(str(family), {})
    if family == "flux" and flavour == KONTEXT:
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
            hint=f"flavours that do: {', '.join(name for name in flavours if name)}",
        )
    _check_assistant(arguments, result)
    base = given or flavours.get(flavour)
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
    is_lora = arguments.get("model_type") == "lora"
    if not is_lora:
        for name in [n for n in arguments if SIMPLETUNER[n].ours.startswith(("lora.", "peft"))]:
            result.ignore(name, arguments.pop(name), "the whole model is trained")
        return
    family = result.values.get("family")
    if arguments.get("lora_type", "standard") == "lycoris":
        for name in [n for n in arguments if SIMPLETUNER[n].ours.startswith("lora.")]:
            result.ignore(name, arguments.pop(name), "lycoris_config says it")
        file = arguments.pop("lycoris_config", "config/lycoris_config.json")
        result.note("kept", "lora_type", arguments.pop("lora_type"), "see lycoris_config", "peft")
        result.note("kept", "lycoris_config", file, "read below", "peft")
        read_lycoris(load_json(find_file(file, path)), str(path), str(family), result)
        return
    if "lora_type" in arguments:
        result.note("kept", "lora_type", arguments.pop("lora_type"), "", "lora")
    if "lycoris_config" in arguments:
        file = arguments.pop("lycoris_config")
        result.ignore("lycoris_config", file, "belongs to lora_type lycoris")
    _put_lora_targets(arguments, result)
    for name in ("lora_rank", "lora_alpha", "lora_dropout"):
        row = SIMPLETUNER[name]
        if name not in arguments and row.default is not None:
            result.assume(row.ours, row.default, "SimpleTuner's default")


def _put_lora_targets(arguments: dict[str, Any], result: ImportedConfig) -> None:
    """Set the layers; Flux has names for sets of layers."""
    name = "flux_lora_target"
    if result.values.get("family") != "flux":
        if name in arguments:
            result.ignore(name, arguments.pop(name), "a key of flux")
        result.assume("lora.target_modules", LORA_LAYERS, "SimpleTuner's default")
        return
    given = arguments.get(name)
    targets = FLUX_TARGETS.get(given or SIMPLETUNER[name].default)
    if targets is None:
        raise PipelineError(
            f"{name} is {given}",
            hint=f"known: {', '.join(FLUX_TARGETS)}; or name layers in lora.target_modules",
        )
    if given is None:
        result.assume("lora.target_modules", targets, "SimpleTuner's default, all")
    else:
        result.keep(name, given, "lora.target_modules", targets)
