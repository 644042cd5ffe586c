"""DiffSynth-Studio's training commands: the two of a split training are one run here."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from zerotrain.config.trackers import TENSORBOARD
from zerotrain.errors import PipelineError
from zerotrain.importers.accelerate import read_accelerate, say_bf16_weights
from zerotrain.importers.command import Command
from zerotrain.importers.diffsynth_model import (
    IN_BF16,
    input_columns,
    put_lora,
    put_model,
    put_quantization,
    put_trained,
)
from zerotrain.importers.imported_config import ImportedConfig, Note, Outcome
from zerotrain.importers.key_values import drop_dependents, put_rows, read_keys
from zerotrain.importers.keys import DIFFSYNTH
from zerotrain.importers.program import (
    SurroundingSettings,
    diffsynth,
    put_arguments,
    put_save_every,
    put_until,
)

PREPARE = "sft:data_process"

LOGS = {
    "enable_tensorboard_log": TENSORBOARD, "enable_swanlab_log": "swanlab",
    "enable_wandb_log": "wandb",
}  # fmt: skip

BUCKETS = "data.aspect_buckets"
KEEPS_SHAPE = {
    "alignment": 16, "min_aspect": 0.25, "max_aspect": 4.0, "crop": "center", "max_upscale": 1.0,
}  # fmt: skip
"""As in DiffSynth-Studio: multiples of 16, and images of fewer pixels are not enlarged."""
SIZES_DIFFER = (
    "DiffSynth-Studio computes a size for each image; here an image gets the nearest shape of a "
    "list, from 1:4 to 4:1, and all images of a step have one size"
)

FROM_PREPARING = (
    *("dataset_base_path", "dataset_metadata_path", "data_file_keys"),
    *("extra_inputs", "zero_cond_t"),
)
SIZES = ("height", "width", "max_pixels")
"""What the preparing command alone decides: the training command reads encoded images."""


def read_diffsynth(
    given: Sequence[Mapping[str, Any]],
    launch: tuple[Mapping[str, Any], Any],
    where: str,
    result: ImportedConfig,
    context: SurroundingSettings,
) -> None:
    """Read one command, or the two of a split training.

    Args:
        given: The arguments of each command.
        launch: accelerate's YAML with the flags of the training command, and the YAML's path.
        where: Name of the script in messages.
        result: Receives a complete run.
        context: The surrounding settings.

    Raises:
        PipelineError: an argument is not supported.
    """
    read = [read_keys(arguments, DIFFSYNTH, where, result) for arguments in given]
    tasks = [str(arguments.get("task", "sft")) for arguments in read]
    prepare = [a for a, task in zip(read, tasks, strict=True) if task == PREPARE]
    train = [a for a, task in zip(read, tasks, strict=True) if task in ("sft", "sft:train")]
    _check_tasks(tasks, len(prepare), len(train), where)
    for task in tasks:
        reason = "the cache stage of the same run" if task == PREPARE else "the phase"
        if len(tasks) == 2:
            reason += ": both commands are one run, and the cache is made where it is missing"
        elif task == PREPARE:
            reason += ": `snakemake cache` makes it, `snakemake train` continues with the phase"
        result.note("kept", "task", task, reason, "phases")
    if train:
        _merge(prepare, train[0], result)
        arguments = train[0]
    else:
        arguments, prepare = prepare[0], []
    drop_dependents(arguments, DIFFSYNTH, result)
    program = diffsynth(arguments)
    result.attempt(_put_data, arguments, result)
    result.attempt(put_model, prepare, arguments, result, where, whole=not train)
    result.attempt(put_trained, arguments, result)
    result.attempt(put_lora, arguments, result)
    result.attempt(put_quantization, arguments, result)
    _put_trackers(arguments, result)
    put_until(result, program, "max_steps", "num_epochs")
    if result.values.get("family") in IN_BF16:
        reason = "DiffSynth-Studio loads this model in bf16, whatever its launcher says"
        context = replace(context, precision_default=("bf16", reason))
    config, path = launch
    read_accelerate(config, path, result, replace(context, program=program))
    in_bf16 = result.values.get("family") in IN_BF16
    say_bf16_weights(result, config, program.name, in_bf16=in_bf16)
    if "save_steps" in arguments:
        put_save_every(result, "save_steps", arguments["save_steps"], None)
    put_arguments(result, program, file_wins=True)


def _check_tasks(tasks: Sequence[str], prepare: int, train: int, where: str) -> None:
    """Check that the tasks form one run."""
    if 1 <= prepare + train == len(tasks) and train <= 1 and prepare <= 1:
        return
    if train > 1:
        raise PipelineError(
            f"{where}: {train} trainings are as many runs",
            hint="import them one by one; what the second starts from, name in its `base` or its "
            "`resume_from_checkpoint`",
        )
    raise PipelineError(
        f"{where}: tasks {', '.join(tasks)}",
        hint="paste one command of sft, sft:train or sft:data_process, or the last two of them "
        "together; other tasks distill, and have another loss",
    )


def _merge(prepare: list[dict[str, Any]], train: dict[str, Any], result: ImportedConfig) -> None:
    """Give the training command the data of the preparing command."""
    for arguments in prepare:
        for name in SIZES:
            if name in train and train[name] != arguments.get(name):
                result.ignore(name, train.pop(name), "the preparing command decides the size")
        for name, value in arguments.items():
            if name in SIZES and name not in train:
                train[name] = value
            elif name in FROM_PREPARING:
                cached = train.get(name)
                train[name] = value
                if cached is not None:
                    result.ignore(name, cached, "the cache of the run, made from the images")
            elif name == "output_path":
                result.ignore(f"{name} ({PREPARE})", value, "the cache lies under results/data")
            elif name not in ("task", "model_id_with_origin_paths"):
                same = train.get(name) == value
                reason = "the training command says the same" if same else "the cache needs it not"
                result.ignore(f"{name} ({PREPARE})", value, reason)


def _put_data(arguments: dict[str, Any], result: ImportedConfig) -> None:
    if "dataset_base_path" in arguments:
        result.assume("data.source", "folder", "images of a folder")
    put_rows({**arguments}, DIFFSYNTH, result, "dataset_base_path", "dataset_metadata_path")
    height, width = arguments.get("height"), arguments.get("width")
    given = arguments.get("max_pixels")
    conditioned = bool(input_columns(arguments))
    if height is None and width is None:
        _put_area(given, result, conditioned=conditioned)
        return
    _put_size(height, width, result, conditioned=conditioned)
    if given is not None:
        result.ignore("max_pixels", given, "height and width say the size")


def _put_area(given: int | None, result: ImportedConfig, *, conditioned: bool) -> None:
    """Set sizes of about the shape of each image, of at most so many pixels."""
    pixels = given if given is not None else DIFFSYNTH["max_pixels"].default
    if pixels < 256:
        raise PipelineError(f"max_pixels is {pixels}", hint="give at least 256")
    side = math.isqrt(pixels) // 16 * 16
    if conditioned:
        reason = (
            "the centre square of each image, scaled to that area; DiffSynth-Studio keeps the "
            "aspect of each image, and the size of smaller ones"
        )
        result.put("changed", "max_pixels", given, "train.resolution", side, reason)
        return
    if given is None:
        reason = f"the square of {pixels} pixels, DiffSynth-Studio's max_pixels"
        result.assume("train.resolution", side, reason)
    else:
        outcome: Outcome = "kept" if side * side == given else "changed"
        reason = "the side of that area's square, a multiple of 16"
        result.put(outcome, "max_pixels", given, "train.resolution", side, reason)
    result.put("changed", "max_pixels", given, BUCKETS, {**KEEPS_SHAPE}, SIZES_DIFFER)


def _put_size(
    height: int | None, width: int | None, result: ImportedConfig, *, conditioned: bool
) -> None:
    """Set the one size that every image is cut to."""
    said = f"height {height}, width {width}"
    if height is None or width is None:
        raise PipelineError(
            f"{said}: DiffSynth-Studio reads one of them only with the other",
            hint="give both, or none for sizes of the shape of each image",
        )
    if min(height, width) < 8 or height % 8 or width % 8:
        raise PipelineError(
            f"{said}: not both are multiples of 8",
            hint="give multiples of 8, of Flux, SD3 and Qwen-Image multiples of 16",
        )
    if height == width:
        result.keep("height", height, "train.resolution")
        result.keep("width", width, "train.resolution")
        return
    if conditioned:
        raise PipelineError(
            f"{said}: with conditioning images all images are cut to squares",
            hint="give both alike, a multiple of 8",
        )
    step = 8 if height % 16 or width % 16 else 16
    side = math.ceil((math.isqrt(height * width - 1) + 1) / step) * step
    sizes = {"alignment": step, "sizes": [[width, height]]}
    result.keep("height", height, BUCKETS, sizes)
    result.keep("width", width, BUCKETS, sizes)
    result.keep("height", height, "train.resolution", side, "the side of a square that holds it")


def _put_trackers(arguments: dict[str, Any], result: ImportedConfig) -> None:
    """Set the trackers; each has a flag."""
    on = [name for name in LOGS if arguments.pop(name, False)]
    for name in on:
        result.note("kept", name, True, "", "train.report_to")
    if on:
        result.values["train.report_to"] = [LOGS[name] for name in on]
    put_rows(arguments, DIFFSYNTH, result, "wandb_project", "swanlab_project")


PRESET = ("preset_lora_path", "preset_lora_model")


def split_trainings(commands: Sequence[Command]) -> tuple[list[Command], list[Command]] | None:
    """Split a differential training, the second without the flags of its preset LoRA.

    It trains a LoRA on a base that another LoRA is fused into. The script has two trainings; the
    second loads the result of the first by --preset_lora_path. Here they are two runs, and the base
    of the second is the merged weights of the first.

    Returns:
        The commands of each; None if it is not such a script, or if the second does not load the
        last weights of the first into the model that both train.
    """
    ends = [i for i, one in enumerate(commands) if one.arguments.get("task") != PREPARE]
    if len(ends) != 2:
        return None
    first, second = (commands[i].arguments for i in ends)
    epochs = str(first.get("num_epochs", DIFFSYNTH["num_epochs"].default))
    folder, preset = first.get("output_path", ""), second.get(PRESET[0])
    # A flag without a value is True.
    if not re.fullmatch(r"\d{1,9}", epochs) or not isinstance(folder, str):
        return None
    file = PurePosixPath(folder) / f"epoch-{int(epochs) - 1}.safetensors"
    if not isinstance(preset, str) or PurePosixPath(preset) != file:
        return None
    if not second.get(PRESET[1]) == first.get("lora_base_model") == second.get("lora_base_model"):
        return None
    own = {name: value for name, value in second.items() if name not in PRESET}
    after = [*commands[ends[0] + 1 : ends[1]], replace(commands[ends[1]], arguments=own)]
    return list(commands[: ends[0] + 1]), [*after, *commands[ends[1] + 1 :]]


def join_trainings(first: ImportedConfig, second: ImportedConfig, preset: str) -> ImportedConfig:
    """Let the second training start from the merged weights of the first."""
    run, base = first.values["run"], f"merged/{first.values['run']}"
    weights = f"results/{run}/{first.nested()['phases'][0]['name']}/weights"
    reason = (
        f"the base with the LoRA of the run {run}; make it when that has been trained: `zerotrain "
        f"export {weights} --to merged --dtype bf16 --output {base}`"
    )
    notes = [note for note in second.notes if note.ours != "base"]
    return replace(
        second,
        values={**second.values, "base": base},
        notes=[*notes, Note(PRESET[0], preset, "changed", "base", base, reason)],
        before=first,
    )
