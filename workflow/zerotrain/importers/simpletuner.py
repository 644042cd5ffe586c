"""SimpleTuner's config.json, with its deepspeed_config."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from zerotrain.artifact.documents import check_object, parse_json
from zerotrain.errors import PipelineError
from zerotrain.importers.deepspeed import read_deepspeed, read_plain
from zerotrain.importers.files import find_file, load_json, named_file
from zerotrain.importers.imported_config import ImportedConfig
from zerotrain.importers.key_values import assume_defaults, drop_dependents, put_rows, read_keys
from zerotrain.importers.keys import SIMPLETUNER, SIMPLETUNER_VALUES
from zerotrain.importers.program import (
    Part,
    SurroundingSettings,
    note_rest,
    put_arguments,
    put_micro_batch,
    put_resume,
    put_save_every,
    put_until,
    simpletuner,
)
from zerotrain.importers.simpletuner_captions import CAPTIONS, put_captions, share_captions
from zerotrain.importers.simpletuner_data import put_datasets, put_resolution, read_backends
from zerotrain.importers.simpletuner_model import put_adapter, put_base, put_family, put_precision
from zerotrain.importers.simpletuner_training import put_objective, put_token_routes, settings_of

BLOCK = "deepspeed_config"
SAMPLING = "data_backend_sampling"


def is_wrapped(found: Mapping[str, Any]) -> bool:
    """Return whether the settings are under `config`, as written by SimpleTuner's WebUI."""
    return set(found) <= {"_metadata", "config"} and isinstance(found.get("config"), dict)


def read_simpletuner(
    config: Mapping[str, Any],
    path: Path | None,
    result: ImportedConfig,
    context: SurroundingSettings,
) -> None:
    """Read SimpleTuner's settings, and the DeepSpeed configuration in them or next to them.

    Raises:
        PipelineError: a key or value is not supported.
    """
    where = str(path or "SimpleTuner")
    plain, block = _settings(config)
    for name in [name for name in plain if name not in SIMPLETUNER]:
        prefixes = SIMPLETUNER_VALUES["subordinate"].items()
        if master := next((m for prefix, m in prefixes if name.startswith(prefix)), None):
            result.ignore(name, plain.pop(name), f"belongs to {master}")
    arguments = read_keys(plain, SIMPLETUNER, where, result)
    launched = context.accelerate_deepspeed
    deepspeed = block is not None or launched is not None
    prompt = not arguments.get("validation_disable") and arguments.get("validation_prompt")
    drop_dependents(arguments, SIMPLETUNER, result, deepspeed=deepspeed, validation_prompt=prompt)
    if block is not None and launched is not None:
        raise PipelineError(
            f"{where}: {BLOCK}, and accelerate's configuration turns DeepSpeed on as well",
            hint="let one of them say it",
        )
    result.attempt(put_family, arguments, result)
    fixed = _optimizer(arguments, result, deepspeed=deepspeed)
    program = replace(simpletuner(arguments), fixed=fixed)
    context = replace(context, program=program, offload_path=arguments.get("offload_param_path"))
    default, reason = program.value("launch.mixed_precision") or ("bf16", "")
    context = replace(context, precision_default=(default, reason))
    if "mixed_precision" in arguments:
        context = context.with_precision(default, "mixed_precision")
    if "num_processes" in arguments and context.processes.value is None:
        result.keep("num_processes", arguments["num_processes"], "launch.num_processes")
        context = replace(context, processes=Part(arguments["num_processes"], "num_processes"))
    elif context.processes.value is not None:
        result.assume("launch.num_processes", context.processes.value, context.processes.reason)
    with result.collect():
        if block is not None:
            found = _deepspeed(block, path, result)
            read_deepspeed(found, f"{where}: {BLOCK}", result, context)
        elif launched is not None:
            read_deepspeed(launched[1], launched[0], result, context)
        else:
            read_plain(result, context)
            assume_defaults(arguments, SIMPLETUNER, result, "train.grad_clip_method")
    _put_model(arguments, path, result, is_training=bool({"model_family", "model_type"} & {*plain}))
    result.attempt(put_micro_batch, result, program, file_wins=True)
    steps = None
    with result.collect():
        if {"max_train_steps", "num_train_epochs"} & set(arguments):
            if arguments.get("max_train_steps") == 0:
                result.ignore_all(arguments, ["max_train_steps"], "epochs count")
            elif arguments.get("num_train_epochs") == 0:
                result.ignore_all(arguments, ["num_train_epochs"], "steps count")
            steps = put_until(result, program, "max_train_steps", "num_train_epochs")
    with result.collect():
        for name in ("checkpointing_steps", "checkpoint_step_interval"):
            if name in arguments:
                put_save_every(result, name, arguments[name], steps)
    result.attempt(put_arguments, result, program, file_wins=True)
    names = "optimizer", "lr_scheduler", "mixed_precision", "grad_clip_method"
    reason = "SimpleTuner lets its DeepSpeed configuration win"
    note_rest(result, program, names, "no-op", reason)


def simpletuner_config(words: list[str]) -> Path:
    """Return the settings file of `simpletuner train`: from --env, or config/config.json.

    Raises:
        PipelineError: there are further arguments, or the file is missing.
    """
    rest = [part for word in words for part in word.split("=", 1)]
    name = ""
    if rest[:1] in (["--env"], ["-e"], ["env"]) and len(rest) >= 2:
        name, rest = rest[1], rest[2:]
    if rest:
        raise PipelineError(
            f"simpletuner train: {rest[0]} belongs into its config.json",
            hint="paste `simpletuner train` or `simpletuner train --env NAME`",
        )
    path = named_file(str(Path("config") / name / "config.json"))
    if not os.path.isfile(path):  # Path.is_file raises on a name that is too long
        raise PipelineError(
            f"simpletuner train reads {path}, which is not there",
            hint="run this in SimpleTuner's folder, or `zerotrain launch import FILE`",
        )
    return path


def read_launch_alone(
    config: Mapping[str, Any], path: Path, result: ImportedConfig, context: SurroundingSettings
) -> None:
    """Read only the DeepSpeed configuration of SimpleTuner's settings, for a run with the rest.

    Raises:
        PipelineError: there is no such configuration.
    """
    plain, block = _settings(config)
    if block is None:
        raise PipelineError(
            f"{path}: settings of SimpleTuner without {BLOCK} say what is trained, but no launch",
            hint=f"`zerotrain launch import {path}` writes a run of them; launch: torch is theirs",
        )
    for name, value in plain.items():
        result.ignore(name, value, "the run says what is trained")
    read_deepspeed(_deepspeed(block, path, result), f"{path}: {BLOCK}", result, context)


def _settings(config: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return the settings by their names without dashes, and the DeepSpeed configuration."""
    inner = config["config"] if is_wrapped(config) else config
    plain = {str(name).lstrip("-"): value for name, value in inner.items()}
    block = plain.pop(BLOCK, None)
    return plain, None if block in ("", {}) else block


def _optimizer(
    arguments: dict[str, Any], result: ImportedConfig, *, deepspeed: bool
) -> dict[str, Any]:
    """Return the meaning of its optimizer's name, with the numbers in SimpleTuner's code.

    Under DeepSpeed it is AdamW with adam_beta1 and so on, whatever the name.
    """
    dtype = "base_model_default_dtype"
    if deepspeed:
        result.ignore_all(arguments, [dtype], "DeepSpeed's AdamW steps in fp32")
        return {"train.optimizer": "adamw"} if "optimizer" not in arguments else {}
    if not {"learning_rate", "optimizer", "model_family", "model_type", dtype} & {*arguments}:
        return {}
    with result.collect():
        return settings_of(arguments, result)
    return {}


def _deepspeed(block: Any, path: Path | None, result: ImportedConfig) -> dict[str, Any]:
    """Return the block, parsed if it is text, or loaded if it names a file."""
    if isinstance(block, dict):
        return block
    if isinstance(block, str) and block.lstrip().startswith("{"):
        source = f"{path}: {BLOCK}"
        return check_object(parse_json(block, source, hint="check quotes and commas"), source)
    if isinstance(block, str):
        result.note("kept", BLOCK, block, "read below", "launch")
        return load_json(find_file(block, path))
    raise PipelineError(
        f"{path}: {BLOCK}: must be keys with values, their text or a file (found {block!r})",
        hint="write the DeepSpeed configuration there",
    )


def _put_model(
    arguments: dict[str, Any], path: Path | None, result: ImportedConfig, *, is_training: bool
) -> None:
    result.attempt(put_base, arguments, result)
    kind = arguments.get("model_type")
    if kind is not None:
        result.note("kept", "model_type", kind, "with `lora:` or without", "lora")
    result.attempt(put_precision, arguments, result)
    result.attempt(put_adapter, arguments, path, result)
    result.attempt(_put_data, arguments, path, result)
    if is_training:
        assume_defaults(arguments, SIMPLETUNER, result, "train.resolution")
    result.attempt(put_objective, arguments, result)
    result.attempt(put_token_routes, arguments, result)
    if arguments.get("use_ema"):
        assume_defaults(arguments, SIMPLETUNER, result, "train.ema_decay", "train.ema_device")
    if "validation_prompt" in arguments:
        names = [name for name in arguments if SIMPLETUNER[name].ours.startswith("validation")]
        put_rows(arguments, SIMPLETUNER, result, *names)
        assume_defaults(arguments, SIMPLETUNER, result, "validation.")
    put_resume(arguments.get("resume_from_checkpoint"), result)


def _put_data(arguments: dict[str, Any], path: Path | None, result: ImportedConfig) -> None:
    """Set the training datasets, or without its file the settings' values."""
    given, kind = arguments.pop("resolution", None), arguments.pop("resolution_type", "pixel_area")
    found: list[dict[str, Any]] = []
    name = "data_backend_config"
    if name in arguments:
        file = arguments.pop(name)
        try:
            named = find_file(file, path)
        except PipelineError:
            result.drop(name, file, "not found: name the images (data.images) and resolution here")
        else:
            result.note("kept", name, file, "read below", "data")
            found = read_backends(named, result)
            for dataset in found:
                if "resolution" in dataset:
                    dataset.setdefault("resolution_type", kind)
                share_captions(arguments, dataset)
            put_datasets(found, result)
    elif "instance_data_dir" in arguments:
        result.keep("instance_data_dir", arguments.pop("instance_data_dir"), "data.images")
    _check_sampling(arguments.pop(SAMPLING, None), len(found), result)
    if found:
        reason = "counts for the datasets that do not say it themselves"
        result.ignore_all(arguments, CAPTIONS, reason)
    else:
        put_captions({n: arguments.pop(n) for n in CAPTIONS if n in arguments}, result)
    if given is not None and any("resolution" in dataset for dataset in found):
        result.ignore("resolution", given, "the dataset says it")
    elif given is not None:
        put_resolution("resolution", given, kind, result)


def _check_sampling(given: str | None, datasets: int, result: ImportedConfig) -> None:
    """Refuse datasets that are drawn equally often, whatever their sizes."""
    if given == "uniform" and datasets > 1:
        raise PipelineError(
            f"{SAMPLING} is {given}: images of all datasets are drawn equally often here",
            hint=f"take it out, and set repeats of each dataset; `--skip {SAMPLING}` as well",
        )
    if given is not None:
        reason = "" if datasets > 1 else "there is one dataset"
        result.note("kept", SAMPLING, given, reason, "data.repeats")
