"""DiffSynth-Studio's training commands: both of a split training are one run here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from zerotrain.errors import PipelineError
from zerotrain.importing.accelerate import read_accelerate
from zerotrain.importing.arguments import name_of, put_arguments, put_save_every, put_until
from zerotrain.importing.deepspeed import Beside
from zerotrain.importing.draft import Draft, read_keys
from zerotrain.importing.keys_programs import DIFFSYNTH
from zerotrain.importing.program import diffsynth

PREPARE = "sft:data_process"
FAMILIES = {
    "qwen-image": "qwen_image",
    "flux.1": "flux",
    "stable-diffusion-xl": "sdxl",
    "stable-diffusion-3": "sd3",
}
"""Beginnings of hub ids' names, and our families."""

SHIFTS = {"qwen_image": 2.2255, "flux": 3.0}
"""diffsynth/diffusion/flow_match.py: e^0.8, and 3."""

FROM_PREPARING = ("dataset_base_path", "dataset_metadata_path", "data_file_keys")


def read_diffsynth(
    given: Sequence[Mapping[str, Any]],
    launch: tuple[Mapping[str, Any], Any],
    where: str,
    draft: Draft,
    beside: Beside,
) -> None:
    """Read one training command, or the two of a split training.

    Args:
        given: The arguments of each command.
        launch: What accelerate's YAML and the flags of the training command say, and its path.
        where: Names the script in messages.
        draft: Gets a whole run.
        beside: What is known from elsewhere.

    Raises:
        PipelineError: an argument that cannot be taken.
    """
    read = [read_keys(arguments, DIFFSYNTH, where, draft) for arguments in given]
    tasks = [str(arguments.get("task", "sft")) for arguments in read]
    prepare = [a for a, task in zip(read, tasks, strict=True) if task == PREPARE]
    train = [a for a, task in zip(read, tasks, strict=True) if task in ("sft", "sft:train")]
    if len(train) != 1 or len(prepare) > 1 or len(prepare) + len(train) != len(read):
        raise PipelineError(
            f"{where}: tasks {', '.join(tasks)}",
            hint="paste one training command (sft or sft:train), with its sft:data_process before "
            "it where there is one",
        )
    for task in tasks:
        reason = "the cache stage of the same run" if task == PREPARE else "the phase"
        if len(tasks) == 2:
            reason += ": both commands are one run, and the cache is made where it is missing"
        draft.say("kept", "task", task, reason, "phases")
    _merge(prepare, train[0], draft)
    arguments = train[0]
    program = diffsynth(arguments)
    _put_data(arguments, draft, split=bool(prepare))
    _put_model(prepare, arguments, draft, where)
    _put_lora(arguments, draft)
    put_until(draft, program, "max_steps", "num_epochs")
    config, path = launch
    read_accelerate(config, path, draft, replace(beside, program=program))
    if "save_steps" in arguments:
        put_save_every(draft, "save_steps", arguments["save_steps"], None)
    put_arguments(draft, program, file_wins=True)


def _merge(prepare: list[dict[str, Any]], train: dict[str, Any], draft: Draft) -> None:
    """Let the training command have the data that the preparing one names."""
    for arguments in prepare:
        for name, value in arguments.items():
            if name in FROM_PREPARING:
                cached = train.get(name)
                train[name] = value
                if cached is not None:
                    draft.ignore(name, cached, "the cache of the run, made from the images")
            elif name not in ("task", "model_id_with_origin_paths", "output_path"):
                same = train.get(name) == value
                reason = "the training command says the same" if same else "the cache needs it not"
                draft.ignore(f"{name} ({PREPARE})", value, reason)
            elif name == "output_path":
                draft.ignore(f"{name} ({PREPARE})", value, "the cache lies under results/data")


def _put_data(arguments: dict[str, Any], draft: Draft, *, split: bool) -> None:
    base = arguments.get("dataset_base_path")
    if base is not None:
        draft.default("data.source", "folder", "images of a folder")
        draft.keep("dataset_base_path", base, "data.images")
    if "dataset_metadata_path" in arguments:
        draft.keep("dataset_metadata_path", arguments["dataset_metadata_path"], "data.metadata")
    height, width = arguments.get("height"), arguments.get("width")
    if height is not None or width is not None:
        if height is None or height != width or height < 8 or height % 8:
            raise PipelineError(
                f"height {height}, width {width}: images are cut to squares",
                hint="give both alike, a multiple of 8",
            )
        draft.keep("height", height, "train.resolution")
        draft.keep("width", width, "train.resolution")
    given = arguments.get("max_pixels")
    pixels = given if given is not None else DIFFSYNTH["max_pixels"].default
    if pixels < 256:
        raise PipelineError(f"max_pixels is {pixels}", hint="give at least 256")
    if given is not None:
        draft.keep("max_pixels", given, "data.max_pixels")
    if "train.resolution" not in draft.values:
        side = math.isqrt(pixels) // 16 * 16
        draft.default("train.resolution", side, f"the largest square of {pixels} pixels, by 16")


def _put_model(
    prepare: list[dict[str, Any]], arguments: dict[str, Any], draft: Draft, where: str
) -> None:
    name = "model_id_with_origin_paths"
    parts = [a[name] for a in (*prepare, arguments) if name in a]
    base = ",".join(parts) or arguments.get("model_paths")
    if base is None:
        raise PipelineError(f"{where}: no --{name}", hint="paste the whole command line")
    if not parts:
        draft.keep("model_paths", base, "base")
    elif len(parts) == 1:
        draft.keep(name, parts[0], "base")
    else:
        for part in parts:
            draft.keep(name, part, "base", base, "the parts of both commands are one model")
    repo = base.partition(":")[0]
    tail = repo.rpartition("/")[2].casefold()
    family = next((f for start, f in FAMILIES.items() if tail.startswith(start)), None)
    if family is None:
        raise PipelineError(
            f"{where}: {repo} is of no family that zerotrain trains",
            hint=f"families: {', '.join(sorted(set(FAMILIES.values())))}",
        )
    draft.default("family", family, f"by its name, {repo}")
    _put_objective(family, draft)
    output = arguments.get("output_path")
    if output is not None:
        draft.keep("output_path", output, "run", name_of(output), "results lie under results/<run>")
    else:
        draft.default("run", name_of(repo), "named by its model")


def _put_objective(family: str, draft: Draft) -> None:
    """What its training loss is, which no flag says."""
    if family in SHIFTS:
        draws = "DiffSynth-Studio draws every timestep equally often"
        draft.default("train.weighting_scheme", "none", draws)
        draft.default("train.flow_shift", SHIFTS[family], "DiffSynth-Studio's own, at every size")
        draft.leave(
            "loss weights", None, "DiffSynth-Studio weighs middle timesteps higher; here all count "
            "alike, and weighting_scheme: cosmap is the nearest",
        )  # fmt: skip
    draft.default("train.caption_dropout_probability", 0.0, "DiffSynth-Studio drops no caption")


def _put_lora(arguments: dict[str, Any], draft: Draft) -> None:
    base = arguments.get("lora_base_model")
    if base is None:
        for name in ("lora_rank", "lora_target_modules"):
            if name in arguments:
                draft.ignore(name, arguments.pop(name), "no lora_base_model: no LoRA is trained")
    else:
        if base not in ("dit", "unet"):
            raise PipelineError(
                f"lora_base_model is {base}", hint="a LoRA is the denoiser's: dit or unet"
            )
        draft.say("kept", "lora_base_model", base, "the denoiser, which is what is trained", "lora")
        modules = [m.strip() for m in str(arguments.get("lora_target_modules", "")).split(",")]
        modules = [module for module in modules if module]
        if modules:
            draft.keep(
                "lora_target_modules", arguments["lora_target_modules"], "lora.target_modules",
                modules,
            )  # fmt: skip
        rank = arguments.get("lora_rank", DIFFSYNTH["lora_rank"].default)
        if rank < 1:
            raise PipelineError(f"lora_rank is {rank}", hint="give a rank from 1 on")
        if "lora_rank" in arguments:
            draft.keep("lora_rank", rank, "lora.rank")
        else:
            draft.default("lora.rank", rank, "DiffSynth-Studio's default")
        draft.default("lora.alpha", float(rank), "DiffSynth-Studio's alpha is the rank")
    resume = [n for n in ("resume_from_checkpoint", "lora_checkpoint") if n in arguments]
    for name in resume:
        draft.keep(name, arguments[name], "resume_from_checkpoint")
