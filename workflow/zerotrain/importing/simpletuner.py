"""SimpleTuner's config.json, with its deepspeed_config."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from zerotrain.errors import PipelineError
from zerotrain.importing.accelerate import find_file
from zerotrain.importing.arguments import (
    name_of,
    put_arguments,
    put_micro_batch,
    put_save_every,
    put_until,
)
from zerotrain.importing.batch import Part
from zerotrain.importing.deepspeed import Beside, load_json, read_deepspeed, read_plain
from zerotrain.importing.draft import Draft, read_keys
from zerotrain.importing.keys_programs import SIMPLETUNER
from zerotrain.importing.objective import drop_keys_of_others, put_flow, put_noise_offset
from zerotrain.importing.program import simpletuner

FAMILIES = {"sdxl": "sdxl", "sd3": "sd3", "qwen_image": "qwen_image", "flux": "flux"}
BLOCK = "deepspeed_config"
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
"""simpletuner/helpers/models/flux/model.py, without names of its own fused layers."""


def read_simpletuner(
    config: Mapping[str, Any], path: Path | None, draft: Draft, beside: Beside
) -> None:
    """Read SimpleTuner's settings, and the DeepSpeed configuration in or beside them.

    Raises:
        PipelineError: a key or value that cannot be taken.
    """
    where = str(path or "SimpleTuner")
    plain = {str(name).lstrip("-"): value for name, value in config.items()}
    block = plain.pop(BLOCK, None)
    arguments = read_keys(plain, SIMPLETUNER, where, draft)
    program = simpletuner(arguments)
    beside = replace(beside, program=program, offload_path=arguments.get("offload_param_path"))
    default, reason = program.value("launch.mixed_precision") or ("bf16", "")
    beside = replace(beside, precision_default=(default, reason))
    if "mixed_precision" in arguments:
        beside = beside.with_precision(default, "mixed_precision")
    if "num_processes" in arguments and beside.processes.value is None:
        draft.keep("num_processes", arguments["num_processes"], "launch.num_processes")
        beside = replace(beside, processes=Part(arguments["num_processes"], "num_processes"))
    elif beside.processes.value is not None:
        draft.default("launch.num_processes", beside.processes.value, beside.processes.reason)
    if block in (None, "", {}):
        read_plain(draft, beside)
    else:
        found = _deepspeed(block, path, draft)
        read_deepspeed(found, f"{where}: {BLOCK}", draft, beside)
    _put_model(arguments, draft)
    put_micro_batch(draft, program, file_wins=True)
    steps = None
    if {"max_train_steps", "num_train_epochs"} & set(arguments):
        steps = put_until(draft, program, "max_train_steps", "num_train_epochs")
    for name in ("checkpointing_steps", "checkpoint_step_interval"):
        if name in arguments:
            put_save_every(draft, name, arguments[name], steps)
    put_arguments(draft, program, file_wins=True)
    for name in ("optimizer", "lr_scheduler", "mixed_precision"):
        if name in arguments and name not in {note.key for note in draft.notes}:
            draft.ignore(name, arguments[name], "SimpleTuner lets its DeepSpeed configuration win")


def _deepspeed(block: Any, path: Path | None, draft: Draft) -> dict[str, Any]:
    """The block itself, its text, or the file that it names."""
    if isinstance(block, dict):
        return block
    if isinstance(block, str) and block.lstrip().startswith("{"):
        try:
            found = json.loads(block)
        except ValueError as error:
            raise PipelineError(
                f"{path}: {BLOCK}: not valid JSON: {error}", hint="check quotes and commas"
            ) from error
        return dict(found)
    if isinstance(block, str):
        draft.say("kept", BLOCK, block, "read below", "launch")
        return load_json(find_file(block, path))
    raise PipelineError(
        f"{path}: {BLOCK}: must be keys with values, their text or a file (found {block!r})",
        hint="write the DeepSpeed configuration there",
    )


def _put_model(arguments: dict[str, Any], draft: Draft) -> None:
    base = arguments.get("pretrained_model_name_or_path")
    if base is not None:
        draft.keep("pretrained_model_name_or_path", base, "base")
        draft.default("run", name_of(base), "named by its model")
    family = arguments.get("model_family")
    if family is not None:
        if family.casefold() not in FAMILIES:
            raise PipelineError(
                f"model_family is {family}", hint=f"families: {', '.join(FAMILIES)}"
            )
        draft.keep("model_family", family, "family", FAMILIES[family.casefold()])
    kind = arguments.get("model_type")
    if kind is not None:
        draft.say("kept", "model_type", kind, "with `lora:` or without", "lora")
    if kind == "lora":
        _put_lora_targets(arguments, draft)
        for name in ("lora_rank", "lora_alpha", "lora_dropout"):
            row = SIMPLETUNER[name]
            if name not in arguments and row.default is not None:
                draft.default(row.ours, row.default, "SimpleTuner's default")
    else:
        for name in [n for n in arguments if SIMPLETUNER[n].ours.startswith("lora.")]:
            draft.ignore(name, arguments.pop(name), "the whole model is trained")
    resolution = arguments.get("resolution")
    if resolution is not None:
        area = 0 < resolution < 8
        pixels = math.isqrt(int(resolution * 1024**2)) if area else int(resolution)
        side = pixels // 8 * 8
        if side < 8:
            raise PipelineError(f"resolution is {resolution}", hint="give a side in pixels")
        reason = "an area in megapixels: the side of its square" if area else ""
        draft.keep("resolution", resolution, "train.resolution", side, reason)
    _put_objective(arguments, draft)
    _put_average(arguments, draft)
    resume = arguments.get("resume_from_checkpoint")
    if resume == "latest":
        draft.ignore("resume_from_checkpoint", resume, "a run goes on from its newest by itself")
    elif resume is not None:
        draft.keep("resume_from_checkpoint", resume, "resume_from_checkpoint")
    if "caption_strategy" in arguments:
        given = arguments["caption_strategy"]
        if given != "textfile":
            raise PipelineError(
                f"caption_strategy is {given}",
                hint="captions come from text files beside the images or from metadata.csv",
            )
        draft.say("kept", "caption_strategy", given, "files beside the images", "data")


def _put_objective(arguments: dict[str, Any], draft: Draft) -> None:
    family = draft.values.get("family")
    if family is None:
        return
    drop_keys_of_others(arguments, SIMPLETUNER, family, draft)
    if family == "sdxl":
        put_noise_offset(arguments, draft)
    else:
        put_flow(arguments, draft)


def _put_average(arguments: dict[str, Any], draft: Draft) -> None:
    """Its defaults are not ours, and without an average its keys mean nothing."""
    for name in ("ema_decay", "ema_device", "ema_update_interval"):
        row = SIMPLETUNER[name]
        if not arguments.get("use_ema"):
            if name in arguments:
                draft.ignore(name, arguments.pop(name), "without use_ema no average is kept")
        elif name not in arguments and row.default is not None:
            draft.default(row.ours, row.default, "SimpleTuner's default")


def _put_lora_targets(arguments: dict[str, Any], draft: Draft) -> None:
    """Flux has names for sets of layers."""
    name = "flux_lora_target"
    if draft.values.get("family") != "flux":
        if name in arguments:
            draft.ignore(name, arguments.pop(name), "a key of flux")
        return
    given = arguments.get(name)
    targets = FLUX_TARGETS.get(given or SIMPLETUNER[name].default)
    if targets is None:
        raise PipelineError(
            f"{name} is {given}",
            hint=f"known: {', '.join(FLUX_TARGETS)}; or name layers in lora.target_modules",
        )
    if given is None:
        draft.default("lora.target_modules", targets, "SimpleTuner's default, all")
    else:
        draft.keep(name, given, "lora.target_modules", targets)
