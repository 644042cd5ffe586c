"""The Trainer of transformers, as used in openMind's guide: a causal language model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from zerotrain.config.data import ALPACA
from zerotrain.errors import PipelineError
from zerotrain.importers.deepspeed import read_deepspeed, read_plain
from zerotrain.importers.files import load_deepspeed
from zerotrain.importers.imported_config import AUTO, ImportedConfig
from zerotrain.importers.key_values import put_rows, read_keys
from zerotrain.importers.keys import TRAINER
from zerotrain.importers.program import (
    SurroundingSettings,
    name_of,
    note_rest,
    put_arguments,
    put_micro_batch,
    put_resume,
    put_save_every,
    put_until,
    trainer,
)


def read_trainer(
    given: Mapping[str, Any],
    where: str,
    result: ImportedConfig,
    context: SurroundingSettings,
    family: str = "causal_lm",
) -> None:
    """Read the Trainer's arguments and the DeepSpeed file that they name.

    Raises:
        PipelineError: an argument is not supported, or contradicts the file.
    """
    given = dict(given)
    _note_evaluation(given, result)
    arguments = read_keys(given, TRAINER, where, result)
    _read_warmup(arguments, result)
    program = trainer(arguments)
    context = replace(context, program=program)
    result.assume("family", family, "what this script trains; change it for another family")
    _put_model(arguments, result, where)
    steps = put_until(result, program, "max_steps", "num_train_epochs")
    file = arguments.get("deepspeed")
    config = load_deepspeed(file, None)[1] if file is not None else None
    if context.accelerate_deepspeed is not None and config is not None:
        raise PipelineError(
            f"--deepspeed {file}, and accelerate's configuration turns DeepSpeed on as well",
            hint="HF Trainer takes one of them: leave one out",
        )
    if context.accelerate_deepspeed is not None:
        file, config = context.accelerate_deepspeed
    context = _with_precision(arguments, context, config, result)
    if config is None:
        read_plain(result, context)
    else:
        if "deepspeed" in arguments:
            result.note("kept", "deepspeed", file, "read below", "launch")
        read_deepspeed(config, str(file), result, context)
    note_rest(result, program, ("bf16", "fp16"), "kept", "", "launch.mixed_precision")
    put_micro_batch(result, program, file_wins=False)
    _put_saving(arguments, result, steps)
    _put_compilation(arguments, result)
    put_arguments(result, program, file_wins=False)
    names = "optim", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_ratio", "warmup_steps"
    note_rest(result, program, names, "kept", "with the DeepSpeed file", "train")


def _read_warmup(arguments: dict[str, Any], result: ImportedConfig) -> None:
    """Give a warm-up of less than one step its other name, and cut a fraction of more.

    Source: transformers/training_args.py, get_warmup_steps.
    """
    steps = arguments.get("warmup_steps", 0)
    if 0 < steps < 1 and not arguments.get("warmup_ratio"):
        arguments["warmup_ratio"] = arguments.pop("warmup_steps")
        reason = "below 1 it is warmup_ratio"
        result.note("kept", "warmup_steps", steps, reason, "train.lr_warmup_ratio", steps)
    elif steps >= 1:
        arguments["warmup_steps"] = int(steps)


def _put_model(arguments: dict[str, Any], result: ImportedConfig, where: str) -> None:
    base = arguments.get("model_name_or_path")
    if base is None:
        raise PipelineError(
            f"{where}: no --model_name_or_path", hint="paste the whole command line"
        )
    named = "named by its model"
    if (output := arguments.get("output_dir")) is not None:
        reason = f"{named}; {TRAINER['output_dir'].reason}"
        result.keep("output_dir", output, "run", name_of(base), reason)
    else:
        result.assume("run", name_of(base), named)
    put_rows({**arguments}, TRAINER, result, "model_name_or_path", "model_revision")
    if "data_path" in arguments:
        result.assume("data.source", "text", "what a JSON of instructions is")
        put_rows({**arguments}, TRAINER, result, "data_path")
        result.assume(
            "data.prompt_template", ALPACA,
            "Stanford Alpaca's text, which scripts with this flag have; without this key the "
            "tokenizer's chat template",
        )  # fmt: skip
        result.assume(
            "evaluate.split", "train",
            "the script holds no rows out; data.holdout and split: holdout measure new ones",
        )  # fmt: skip
    put_resume(arguments.get("resume_from_checkpoint"), result, ("yes", "true", "no", "false"))


def _with_precision(
    arguments: dict[str, Any],
    context: SurroundingSettings,
    config: dict[str, Any] | None,
    result: ImportedConfig,
) -> SurroundingSettings:
    on = [kind for kind in ("bf16", "fp16") if arguments.get(kind)]
    if len(on) == 2:
        raise PipelineError("--bf16 and --fp16 are both given", hint="take one of them out")
    launchers = context.precision_source == "mixed_precision"
    if on and launchers and context.precision not in (None, on[0]):
        # TrainingArguments sets the variable by which accelerate chooses.
        reason = f"HF Trainer's --{on[0]} takes its place"
        ours = "launch.mixed_precision"
        result.notes = [note for note in result.notes if note.key != "mixed_precision"]
        result.note("changed", "mixed_precision", context.precision, reason, ours)
        return replace(context, precision=on[0], precision_source=f"--{on[0]}")
    if on:
        return context.with_precision(on[0], f"--{on[0]}")
    sections = [(config or {}).get(kind) for kind in ("bf16", "fp16")]
    auto = any(isinstance(found, dict) and found.get("enabled") == AUTO for found in sections)
    if auto and context.precision is None:
        return context.with_precision("no", "a command without --bf16 and --fp16")
    return context


def _note_evaluation(given: dict[str, Any], result: ImportedConfig) -> None:
    """Report how held-out rows are measured here; the script's code decides which it holds out."""
    name = next((n for n in ("eval_strategy", "evaluation_strategy") if n in given), None)
    strategy = str(given[name]).casefold() if name is not None else "no"
    if name is None or strategy not in ("steps", "epoch") or name in result.skip:
        return
    default = given.get("logging_steps", TRAINER["logging_steps"].default)
    each = f": {given.get('eval_steps', default)} measures"
    if strategy == "epoch":
        each = ", the steps of an epoch, measures"
    result.drop(
        name, given.pop(name),
        "the script's evaluation set is not known: data.holdout keeps a share of the samples, and "
        f"validation.eval_steps{each} them",
    )  # fmt: skip


def _put_compilation(arguments: dict[str, Any], result: ImportedConfig) -> None:
    """Set torch.compile: a backend or a mode enables it, as in TrainingArguments."""
    on, backend, mode = (
        arguments.get(name)
        for name in ("torch_compile", "torch_compile_backend", "torch_compile_mode")
    )
    ours = "launch.dynamo_backend"
    if on or backend or mode:
        chosen = backend or TRAINER["torch_compile_backend"].default
        for name in ("torch_compile", "torch_compile_backend"):
            if name in arguments:
                result.keep(name, arguments[name], ours, chosen)
        if ours not in result.values:
            result.assume(ours, chosen, "a mode turns compilation on")
    elif on is not None:
        result.note("kept", "torch_compile", on, "asks for nothing more", ours)


def _put_saving(arguments: dict[str, Any], result: ImportedConfig, until: int | None) -> None:
    strategy = str(arguments.get("save_strategy", "steps")).casefold()
    if "save_strategy" in arguments:
        reason = "" if strategy == "steps" else "a checkpoint at the end of a phase is always there"
        result.note(
            "kept" if strategy == "steps" else "changed", "save_strategy",
            arguments["save_strategy"], reason, "train.save_every",
        )  # fmt: skip
    given = arguments.get("save_steps")
    if given is None:
        return
    if strategy != "steps":
        result.ignore("save_steps", given, f"save_strategy is {strategy}")
        return
    if 0 < given < 1:
        raise PipelineError(f"save_steps is {given}", hint="give a number of steps")
    put_save_every(result, "save_steps", int(given), until)
