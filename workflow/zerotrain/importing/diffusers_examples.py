"""The training scripts among diffusers' examples, told by their names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from zerotrain.config.agreement import OF_SCHEME
from zerotrain.errors import PipelineError
from zerotrain.families import FAMILIES
from zerotrain.importing.accelerate import read_accelerate
from zerotrain.importing.arguments import (
    name_of,
    put_arguments,
    put_micro_batch,
    put_save_every,
    put_until,
)
from zerotrain.importing.deepspeed import Beside
from zerotrain.importing.draft import Draft, read_keys
from zerotrain.importing.keys_diffusers import (
    DIFFUSERS,
    DREAMBOOTH_LORA_SDXL,
    LORA_LAYERS,
    SEQUENCE_LENGTHS,
    TEXT_TO_IMAGE,
)
from zerotrain.importing.objective import drop_keys_of_others
from zerotrain.importing.program import Program

SCRIPTS = {
    "train_dreambooth_flux.py": ("flux", DIFFUSERS),
    "train_dreambooth_lora_flux.py": ("flux", DIFFUSERS),
    "train_dreambooth_lora_qwen_image.py": ("qwen_image", DIFFUSERS),
    "train_dreambooth_lora_sd3.py": ("sd3", DIFFUSERS),
    "train_dreambooth_lora_sdxl.py": ("sdxl", DREAMBOOTH_LORA_SDXL),
    "train_dreambooth_sd3.py": ("sd3", DIFFUSERS),
    "train_text_to_image_lora_sdxl.py": ("sdxl", TEXT_TO_IMAGE),
    "train_text_to_image_sdxl.py": ("sdxl", TEXT_TO_IMAGE),
}
"""The family that each trains, and its flags with its defaults."""
CYCLES, POWER = "lr_num_cycles", "lr_power"
OF_SCHEDULES = {CYCLES: ("cosine_with_restarts", "num_cycles"), POWER: ("polynomial", "power")}


def is_example(script: str) -> bool:
    """Whether it is one of those that train a family of ours."""
    return _name(script) in SCRIPTS


def _name(script: str) -> str:
    return script.rpartition("/")[2]


def read_example(
    given: Mapping[str, Any],
    launch: tuple[Mapping[str, Any], Any],
    script: str,
    draft: Draft,
    beside: Beside,
) -> None:
    """Read the arguments of a script, and how it is launched.

    Args:
        given: The arguments.
        launch: What accelerate's YAML and the launcher's flags say, and the YAML's path.
        script: Its name says family, LoRA and the data's form.
        draft: Gets a whole run.
        beside: What is known from elsewhere.

    Raises:
        PipelineError: an argument that cannot be taken.
    """
    family, table = SCRIPTS[_name(script)]
    arguments = read_keys(given, table, script, draft)
    draft.default("family", family, "by the script's name")
    drop_keys_of_others(arguments, table, family, draft)
    scheme = arguments.get("weighting_scheme", FAMILIES[family].weighting_scheme)
    for key, wanted in OF_SCHEME.items():
        if key in arguments and scheme != wanted:
            draft.ignore(key, arguments.pop(key), f"weighting_scheme {wanted} alone reads it")
    program = Program("the script", table, arguments)
    _put_model(arguments, draft, script)
    _put_lora(arguments, program, draft, family, is_lora="_lora_" in _name(script))
    _put_objective(arguments, program, draft, family)
    steps = put_until(draft, program, "max_train_steps", "num_train_epochs")
    config, path = launch
    if "mixed_precision" in arguments:
        beside = beside.with_precision(arguments["mixed_precision"], "--mixed_precision")
    read_accelerate(config, path, draft, replace(beside, program=program))
    _put_schedule(arguments, draft)
    put_micro_batch(draft, program, file_wins=False)
    if "checkpointing_steps" in arguments:
        given_steps = arguments["checkpointing_steps"]
        put_save_every(draft, "checkpointing_steps", given_steps, steps)
    put_arguments(draft, program, file_wins=False)


def _put_model(arguments: dict[str, Any], draft: Draft, script: str) -> None:
    base = arguments.get("pretrained_model_name_or_path")
    if base is None:
        raise PipelineError(
            f"{script}: no --pretrained_model_name_or_path", hint="paste the whole command line"
        )
    draft.keep("pretrained_model_name_or_path", base, "base")
    output = arguments.get("output_dir")
    if output is not None:
        draft.keep("output_dir", output, "run", name_of(output), "results lie under results/<run>")
    else:
        draft.default("run", name_of(base), "named by its model")
    if {"instance_data_dir", "train_data_dir"} & set(arguments):
        draft.default("data.source", "folder", "images of a folder")
    resume = arguments.pop("resume_from_checkpoint", None)
    if resume == "latest":
        draft.ignore("resume_from_checkpoint", resume, "a run goes on from its newest by itself")
    elif resume is not None:
        draft.keep("resume_from_checkpoint", resume, "resume_from_checkpoint")


def _put_lora(
    arguments: dict[str, Any], program: Program, draft: Draft, family: str, *, is_lora: bool
) -> None:
    """The script's adapter, whose first values are gaussian."""
    own = [name for name in arguments if program.table[name].ours.startswith("lora.")]
    if not is_lora:
        for name in own:
            draft.ignore(name, arguments.pop(name), "the whole model is trained")
        return
    rank = program.value("lora.rank")
    assert rank is not None
    if "rank" not in arguments:
        draft.default("lora.rank", *rank)
    if "lora_alpha" not in arguments:
        draft.default("lora.alpha", *_alpha(program, rank[0]))
    if "lora_layers" in arguments:
        layers = [layer.strip() for layer in arguments["lora_layers"].split(",")]
        draft.keep("lora_layers", arguments["lora_layers"], "lora.target_modules", layers)
    else:
        draft.default("lora.target_modules", LORA_LAYERS[family], "in the code of the script")
    draft.default("lora.init_lora_weights", "gaussian", "in the code of the script")


def _alpha(program: Program, rank: int) -> tuple[float, str]:
    """Without lora_alpha: scripts of today have a number of their own, older ones the rank."""
    own = program.table["lora_alpha"].default
    if own is None:
        return float(rank), "the script's alpha is the rank; if yours has a lora_alpha, give it"
    return own, "the script's own lora_alpha; before 2025 it was rank"


def _put_objective(arguments: dict[str, Any], program: Program, draft: Draft, family: str) -> None:
    side = program.value("train.resolution")
    assert side is not None
    if "resolution" in arguments:
        draft.keep("resolution", side[0], "train.resolution")
    else:
        draft.default("train.resolution", *side)
    if family == "flux" and "guidance_scale" not in arguments:
        draft.default("train.flux_guidance_value", 3.5, "the script's own guidance_scale")
    if family in SEQUENCE_LENGTHS and "max_sequence_length" not in arguments:
        reason = "the script's own max_sequence_length"
        draft.default("cache.max_sequence_length", SEQUENCE_LENGTHS[family], reason)
    if "proportion_empty_prompts" not in arguments:
        draft.default("train.caption_dropout_probability", 0.0, "the script drops no caption")


def _put_schedule(arguments: dict[str, Any], draft: Draft) -> None:
    """Arguments that one schedule alone takes."""
    name = draft.values.get("train.lr_scheduler")
    for flag, (schedule, argument) in OF_SCHEDULES.items():
        if flag not in arguments:
            continue
        value = arguments[flag]
        if name == schedule:
            draft.values.setdefault("train.lr_scheduler_args", {})[argument] = value
            draft.say("kept", flag, value, "", "train.lr_scheduler_args", value)
        else:
            draft.ignore(flag, value, f"{schedule} alone takes it")
