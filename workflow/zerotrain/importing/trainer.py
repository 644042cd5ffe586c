"""The Trainer of transformers, as openMind's guide starts it: a causal language model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
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
from zerotrain.importing.deepspeed import Beside, load_json, read_deepspeed, read_plain
from zerotrain.importing.draft import AUTO, Draft, read_keys
from zerotrain.importing.keys_programs import TRAINER
from zerotrain.importing.program import trainer


def read_trainer(
    given: Mapping[str, Any], where: str, draft: Draft, beside: Beside, family: str = "causal_lm"
) -> None:
    """Read the Trainer's arguments and the DeepSpeed file that they name.

    Raises:
        PipelineError: an argument that cannot be taken, or a contradiction with the file.
    """
    arguments = read_keys(given, TRAINER, where, draft)
    program = trainer(arguments)
    beside = replace(beside, program=program)
    draft.default("family", family, "what this script trains; change it for another family")
    _put_model(arguments, draft, where)
    steps = put_until(draft, program, "max_steps", "num_train_epochs")
    file = arguments.get("deepspeed")
    config = load_json(find_file(file, None)) if file is not None else None
    beside = _with_precision(arguments, beside, config)
    if config is None:
        read_plain(draft, beside)
    else:
        draft.say("kept", "deepspeed", file, "read below", "launch")
        read_deepspeed(config, str(file), draft, beside)
    for kind in ("bf16", "fp16"):
        if kind in arguments:
            draft.say("kept", kind, arguments[kind], "", "launch.mixed_precision")
    put_micro_batch(draft, program, file_wins=False)
    _put_saving(arguments, draft, steps)
    put_arguments(draft, program, file_wins=False)
    for name in ("optim", "lr_scheduler_type", "warmup_ratio", "warmup_steps"):
        if name in arguments and name not in {note.key for note in draft.notes}:
            draft.say("kept", name, arguments[name], "with the DeepSpeed file", "train")


def _put_model(arguments: dict[str, Any], draft: Draft, where: str) -> None:
    base = arguments.get("model_name_or_path")
    if base is None:
        raise PipelineError(
            f"{where}: no --model_name_or_path", hint="paste the whole command line"
        )
    output = arguments.get("output_dir")
    if output is not None:
        draft.keep("output_dir", output, "run", name_of(base), "named by its model; " + RESULTS)
    else:
        draft.default("run", name_of(base), "named by its model")
    draft.keep("model_name_or_path", base, "base")
    if "model_revision" in arguments:
        draft.keep("model_revision", arguments["model_revision"], "revision")
    if "data_path" in arguments:
        draft.default("data.source", "text", "what a JSON of instructions is")
        draft.keep("data_path", arguments["data_path"], "data.path")
    if "resume_from_checkpoint" in arguments:
        value = arguments["resume_from_checkpoint"]
        if value.casefold() in ("yes", "true", "no", "false"):
            draft.ignore("resume_from_checkpoint", value, "a run goes on from its newest by itself")
        else:
            draft.keep("resume_from_checkpoint", value, "resume_from_checkpoint")


RESULTS = "results lie under results/<run>/<phase>"


def _with_precision(
    arguments: dict[str, Any], beside: Beside, config: dict[str, Any] | None
) -> Beside:
    on = [kind for kind in ("bf16", "fp16") if arguments.get(kind)]
    if len(on) == 2:
        raise PipelineError("--bf16 and --fp16 are both given", hint="take one of them out")
    if on:
        return beside.with_precision(on[0], f"--{on[0]}")
    sections = [(config or {}).get(kind) for kind in ("bf16", "fp16")]
    auto = any(isinstance(found, dict) and found.get("enabled") == AUTO for found in sections)
    if auto and beside.precision is None:
        return beside.with_precision("no", "a command without --bf16 and --fp16")
    return beside


def _put_saving(arguments: dict[str, Any], draft: Draft, until: int | None) -> None:
    strategy = str(arguments.get("save_strategy", "steps")).casefold()
    if "save_strategy" in arguments:
        reason = "" if strategy == "steps" else "a checkpoint at the end of a phase is always there"
        draft.say(
            "kept" if strategy == "steps" else "changed", "save_strategy",
            arguments["save_strategy"], reason, "train.save_every",
        )  # fmt: skip
    given = arguments.get("save_steps")
    if given is None:
        return
    if strategy != "steps":
        draft.ignore("save_steps", given, f"save_strategy is {strategy}")
        return
    if 0 < given < 1:
        raise PipelineError(f"save_steps is {given}", hint="give a number of steps")
    put_save_every(draft, "save_steps", int(given), until)
