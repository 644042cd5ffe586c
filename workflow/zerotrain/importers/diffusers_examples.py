"""The training scripts among diffusers' examples, recognised by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from zerotrain.config.families import FAMILIES
from zerotrain.config.optimizers import find
from zerotrain.data.metadata import caption_columns
from zerotrain.errors import PipelineError
from zerotrain.importers.accelerate import read_accelerate, say_bf16_weights
from zerotrain.importers.imported_config import ImportedConfig
from zerotrain.importers.key_values import drop_dependents, put_code, put_rows, read_keys
from zerotrain.importers.keys import DIFFUSERS, DIFFUSERS_VALUES, SCRIPTS
from zerotrain.importers.program import (
    Program,
    SurroundingSettings,
    drop_keys_of_others,
    put_arguments,
    put_micro_batch,
    put_resume,
    put_run,
    put_save_every,
    put_until,
    with_autoencoder,
)
from zerotrain.importers.schedule import note_stretched_schedule
from zerotrain.importers.simpletuner_captions import put_captions
from zerotrain.importers.simpletuner_data import FRAMING, HUB, is_local
from zerotrain.importers.step import PRECISION
from zerotrain.launch.keys import Key

KONTEXT_NAME = "train_dreambooth_lora_flux_kontext.py"
ENCODES_ONCE = "train_text_to_image_sdxl.py"
"""It encodes images and captions once, before training."""
LORA_LAYERS: dict[str, list[str]] = DIFFUSERS_VALUES["lora_layers"]
"""The LoRA's layers if lora_layers is not given."""
BUCKETS = "aspect_ratio_buckets"
EDM = "playground-v2.5"
"""A model with an EDM noise schedule, which the SDXL scripts use for its training."""


def is_example(script: str) -> bool:
    """Return whether the script trains one of our families."""
    return script.rpartition("/")[2] in SCRIPTS


def read_example(
    given: Mapping[str, Any],
    launch: tuple[Mapping[str, Any], Any],
    script: str,
    result: ImportedConfig,
    context: SurroundingSettings,
) -> None:
    """Read the arguments of a script, and its launch.

    Args:
        given: The arguments.
        launch: accelerate's YAML with the launcher's flags, and the YAML's path.
        script: Its name determines family, LoRA and the form of the data.
        result: Receives a complete run.
        context: The surrounding settings.

    Raises:
        PipelineError: an argument is not supported.
    """
    name = script.rpartition("/")[2]
    family, table = SCRIPTS[name]
    arguments = read_keys(given, table, script, result)
    result.assume("family", family, "by the script's name")
    drop_keys_of_others(arguments, table, family, result)
    if arguments.pop("use_8bit_adam", False):
        optimizer = arguments.get("optimizer", "AdamW")
        if optimizer.casefold() == "adamw":
            arguments["optimizer"] = "adamw8bit"
            result.note("kept", "use_8bit_adam", True, "", "train.optimizer")
        else:
            result.ignore("use_8bit_adam", True, f"{optimizer} has no moments of 8 bits")
    schedule = arguments.get("lr_scheduler", table["lr_scheduler"].default)
    if "cond_image_column" in arguments:
        reason = "the script fails with both it and cond_image_column"
        result.ignore_all(arguments, ["validation_prompt"], reason)
    drop_dependents(
        arguments, table, result,
        weighting_scheme=arguments.get("weighting_scheme", FAMILIES[family].weighting_scheme),
        lr_scheduler=schedule,
        warm_up=schedule != "constant" or not arguments.get("lr_warmup_steps"),
        lora="_lora_" in name, validation_prompt="validation_prompt" in arguments,
    )  # fmt: skip
    fixed = _optimizer_defaults(arguments)
    program = Program("the script", table, arguments, fixed)
    result.attempt(_put_model, arguments, result, script, family)
    result.attempt(_put_buckets, arguments, program, result)
    with result.collect():
        captioned = "caption_column" in arguments
        _put_data(arguments, result)
        _put_draws(arguments, table, result, name, captioned)
    if "_lora_" in name:
        result.attempt(_put_lora, arguments, program, result, family, script)
    result.attempt(_put_objective, arguments, program, result, family)
    _put_validation(arguments, result)
    steps = None
    with result.collect():
        steps = put_until(result, program, "max_train_steps", "num_train_epochs")
    config, path = launch
    with result.collect():
        if "mixed_precision" in arguments:
            context = context.with_precision(arguments["mixed_precision"], "--mixed_precision")
        read_accelerate(config, path, result, replace(context, program=program))
        # peft's factors have the dtype of the base; the scripts cast them to float32 only for fp16.
        in_bf16 = "_lora_" in name and result.values[PRECISION] == "bf16"
        say_bf16_weights(result, config, "the script", in_bf16=in_bf16)
        _put_schedule(arguments, result)
        put_micro_batch(result, program, file_wins=False)
        if "_text_to_image_" in script:
            note_stretched_schedule(result)
    for ours, value in fixed.items():
        result.assume(ours, value, "the script's flags of Prodigy")
    with result.collect():
        if (interval := arguments.get("checkpointing_steps")) is not None:
            put_save_every(result, "checkpointing_steps", interval, steps)
    result.attempt(put_arguments, result, program, file_wins=False)


def _optimizer_defaults(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the values that the scripts give to Prodigy, which differ from its defaults."""
    if str(arguments.get("optimizer", "")).casefold() != "prodigy":
        return {}
    own = {
        "use_bias_correction": arguments.pop("prodigy_use_bias_correction", True),
        "safeguard_warmup": arguments.pop("prodigy_safeguard_warmup", True),
        "decouple": arguments.pop("prodigy_decouple", True),
        "beta3": arguments.pop("prodigy_beta3", 0.0),
    }
    defaults = find("prodigy")[0].arguments
    return {"train.optimizer_args": {k: v for k, v in own.items() if v != defaults[k]}}


def _put_model(arguments: dict[str, Any], result: ImportedConfig, script: str, family: str) -> None:
    base = arguments.get("pretrained_model_name_or_path")
    if base is None:
        raise PipelineError(
            f"{script}: no --pretrained_model_name_or_path", hint="paste the whole command line"
        )
    if EDM in base:
        raise PipelineError(
            f"pretrained_model_name_or_path: {base} has an EDM noise schedule, by which the script "
            "trains it",
            hint="epsilon and v_prediction are trained here",
        )
    vae = arguments.pop("pretrained_vae_model_name_or_path", None)
    whole = with_autoencoder(base, vae, family) if vae not in (None, "", base) else base
    if vae is not None:
        result.keep("pretrained_vae_model_name_or_path", vae, "base", whole)
    result.keep("pretrained_model_name_or_path", base, "base", whole)
    put_run(arguments.get("output_dir"), base, result, "output_dir")
    put_resume(arguments.pop("resume_from_checkpoint", None), result)


def _put_data(arguments: dict[str, Any], result: ImportedConfig) -> None:
    """Set the images, and their common prompt if no column has captions."""
    conditioning = arguments.pop("cond_image_column", None)
    if conditioning is None and not is_local(arguments.get("dataset_name", ".")):
        captioned = _put_hub_dataset(arguments, result)
    else:
        captioned = _put_folder(arguments, conditioning, result)
    prompt = arguments.pop("instance_prompt", None)
    if prompt is not None and captioned:
        result.ignore("instance_prompt", prompt, "caption_column has the captions")
    elif prompt is not None:
        put_captions({"caption_strategy": "instanceprompt", "instance_prompt": prompt}, result)
    if arguments.pop("center_crop", False):
        result.note("kept", "center_crop", True, "", "train.resolution")
    else:
        result.note("changed", "center_crop", False, FRAMING)


def _put_hub_dataset(arguments: dict[str, Any], result: ImportedConfig) -> bool:
    """Set a dataset of the hub; return whether a column has captions."""
    result.assume("data.source", "huggingface", "images of a dataset of the hub")
    captioned = "caption_column" in arguments or "instance_prompt" not in arguments
    names = ["dataset_name", "dataset_config_name", "image_column", "caption_column"]
    put_rows(arguments, DIFFUSERS, result, *names[: 4 if captioned else 3])
    return captioned


def _put_folder(
    arguments: dict[str, Any], conditioning: str | None, result: ImportedConfig
) -> bool:
    """Set a folder of images, which may have a table; return whether a column has captions."""
    if {"instance_data_dir", "train_data_dir", "dataset_name"} & set(arguments):
        result.assume("data.source", "folder", "images of a folder")
    name = arguments.pop("dataset_name", None)
    if name is not None and is_local(name):
        result.keep("dataset_name", name, "data.images")
    elif name is not None:
        result.put(
            "changed", "dataset_name", name, "data.images", HUB.format(name.rpartition("/")[2]),
            "images with conditioning images are read from a folder: save those of the dataset "
            "there",
        )  # fmt: skip
    pairs = caption_columns([conditioning] if conditioning is not None else [])
    if conditioning is not None:
        names = " or ".join(map(" and ".join, pairs))
        reason = f"files below data.images, in a table with the columns {names}"
        result.keep(
            "cond_image_column", conditioning, "data.conditioning_columns", [conditioning], reason
        )
    result.ignore_all(arguments, ["dataset_config_name"], "belongs to dataset_name")
    reason = "metadata.csv has file_name or image, the one not conditioned on"
    result.ignore_all(arguments, ["image_column"], reason)
    if (column := arguments.pop("caption_column", None)) is not None:
        texts = " or ".join(text for _, text in pairs)
        result.note("changed", "caption_column", column, f"metadata.csv has it as {texts}")
    return column is not None


def _put_buckets(arguments: dict[str, Any], program: Program, result: ImportedConfig) -> None:
    """Check the sizes of Kontext's images, which are squares here."""
    given = {n: arguments.pop(n) for n in (BUCKETS, f"use_{BUCKETS}") if n in arguments}
    side = arguments.get("resolution", program.table["resolution"].default)
    sizes = [size.replace(" ", "") for size in given.get(BUCKETS, "").split(";")]
    if given.get(BUCKETS) and f"{side},{side}" not in sizes:
        raise PipelineError(
            f"{BUCKETS}: {given[BUCKETS]!r} has no {side},{side}, and all images are squares of "
            "that side here",
            hint="set --resolution to the side of a square among them",
        )
    for name, value in given.items():
        if value:
            result.note("changed", name, value, FRAMING)
        else:
            result.note("kept", name, value, "asks for nothing more")


def _put_draws(
    arguments: dict[str, Any],
    table: Mapping[str, Key],
    result: ImportedConfig,
    name: str,
    captioned: bool,
) -> None:
    """Report differences in the script's draws: latents, pairs, mirror images, empty captions."""
    # The vae_encode_mode of Kontext's script is mode.
    differs = "draws" if name != KONTEXT_NAME else "pairs" if captioned else "none"
    put_code(DIFFUSERS_VALUES["code"], SCRIPTS[name][0], result, differs)
    if name != ENCODES_ONCE and "_dreambooth_" not in name:
        return
    for key in ("random_flip", "proportion_empty_prompts"):
        if key in table and (given := arguments.pop(key, None)):
            reason = "drawn again for each epoch; the script draws once, before it trains"
            result.put("changed", key, given, table[key].ours, given, reason)


def _put_validation(arguments: dict[str, Any], result: ImportedConfig) -> None:
    """Set the images of one prompt, at the interval of validation.eval_steps."""
    if "validation_prompt" in arguments:
        put_rows(arguments, DIFFUSERS, result, "validation_prompt")
        result.assume("validation.eval_on_start", False, "the script makes none before it trains")
        put_rows(arguments, DIFFUSERS, result, "num_validation_images")


def _put_lora(
    arguments: dict[str, Any], program: Program, result: ImportedConfig, family: str, script: str
) -> None:
    """Set the script's adapter, with gaussian initial values."""
    program.assume(result, "lora.rank")
    # Newer scripts have a number, older ones the rank.
    alpha = program.table["lora_alpha"].default
    reason = "the script's own lora_alpha; before 2025 it was rank"
    if alpha is None:
        alpha = float(arguments.get("rank", program.table["rank"].default))
        reason = "the script's alpha is the rank; if yours has a lora_alpha, give it"
    if "lora_alpha" not in arguments:
        result.assume("lora.alpha", alpha, reason)
    if "lora_layers" in arguments:
        put_rows(arguments, DIFFUSERS, result, "lora_layers")
    else:
        kontext = ["proj_mlp"] if "kontext" in script else []
        layers = [*LORA_LAYERS[family], *kontext]
        result.assume("lora.target_modules", layers, "in the code of the script")
    result.assume("lora.init_lora_weights", "gaussian", "in the code of the script")


def _put_objective(
    arguments: dict[str, Any], program: Program, result: ImportedConfig, family: str
) -> None:
    program.put("train.resolution", result)
    if family == "flux":
        program.assume(result, "train.flux_guidance_value")
    put_code(DIFFUSERS_VALUES["code"], family, result, "objective")
    if family == "sd3":
        program.assume(result, "train.precondition_outputs")
    program.assume(result, "cache.max_sequence_length")
    if "train.caption_dropout_probability" not in result.values and (
        "proportion_empty_prompts" not in arguments
    ):
        result.assume("train.caption_dropout_probability", 0.0, "the script drops no caption")


def _put_schedule(arguments: dict[str, Any], result: ImportedConfig) -> None:
    """Set arguments that only one schedule takes."""
    ours = "train.lr_scheduler_args"
    for flag, name in (("lr_num_cycles", "num_cycles"), ("lr_power", "power")):
        if flag in arguments:
            result.values.setdefault(ours, {})[name] = arguments[flag]
            result.note("kept", flag, arguments[flag], "", ours, arguments[flag])
