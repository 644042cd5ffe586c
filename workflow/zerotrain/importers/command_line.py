"""Import of pasted command lines: the launcher, the script and its arguments."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from zerotrain.errors import PipelineError
from zerotrain.importers.accelerate import (
    deepspeed_of,
    flags_as_config,
    note_repeated_keys,
    read_accelerate,
)
from zerotrain.importers.command import (
    FLAGS,
    HINT,
    Command,
    find_program,
    parse_commands,
    port,
    processes,
    unknown_script,
)
from zerotrain.importers.deepspeed import read_deepspeed
from zerotrain.importers.diffsynth import PRESET, join_trainings, read_diffsynth, split_trainings
from zerotrain.importers.diffusers_examples import is_example, read_example
from zerotrain.importers.files import (
    cached_config,
    find_file,
    load_deepspeed,
    load_json,
    load_yaml,
    named_file,
)
from zerotrain.importers.imported_config import ImportedConfig
from zerotrain.importers.key_values import read_keys
from zerotrain.importers.keys import PEFT_SCRIPT
from zerotrain.importers.program import ACCELERATE as ACCELERATE_PROGRAM
from zerotrain.importers.program import RUN, Part, Program, SurroundingSettings
from zerotrain.importers.reading import ImportOptions, check, import_file
from zerotrain.importers.simpletuner import read_simpletuner, simpletuner_config
from zerotrain.importers.trainer import read_trainer
from zerotrain.launch.keys import DEEPSPEED_FLAGS, LAUNCH_FLAGS, unknown_key

PEFT_NAME = "peft_lora_seq2seq_accelerate_ds_zero3_offload.py"
PEFT_VALUES = ("train.learning_rate", "train.adam_weight_decay", "train.lr_scheduler")
PEFT_PROGRAM = Program(
    "the script",
    fixed={
        "train.optimizer": "adamw",
        "train.global_batch_size": 8,
        **{key: PEFT_SCRIPT[key] for key in PEFT_VALUES},
    },
)
DEEPSPEED_ARGUMENTS = ("deepspeed", "deepspeed_config")


def import_command(text: str, options: ImportOptions | None = None) -> ImportedConfig:
    """Read one pasted command line, or the two of DiffSynth-Studio's split training.

    Its differential training consists of two runs: the second is returned, and `before` is the
    first.

    Raises:
        PipelineError: there is no such command, or a flag is not supported.
    """
    options = options or ImportOptions()
    if text.split()[:2] == ["simpletuner", "train"]:
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise PipelineError(f"--command: {error}".lower(), hint=HINT) from error
        return import_file(simpletuner_config(words[2:]), options)
    commands = parse_commands(text)
    pair = None if options.skip.intersection(PRESET) else split_trainings(commands)
    if pair is None:
        return _import_run(commands, options)
    first, second = (_import_run(one, options) for one in pair)
    return join_trainings(first, second, commands[-1].arguments[PRESET[0]])


def _import_run(commands: list[Command], options: ImportOptions) -> ImportedConfig:
    """Read the commands of one run."""
    result, last = options.new_config(), commands[-1]
    result.attempt(_read_commands, commands, options, result)
    result.raise_problems(last.script)
    if last.log is not None:
        result.ignore("> " + last.log, None, "rules write logs/")
    check(result, last.script)
    result.source = f"{last.launcher}, {last.script}"
    return result


def _read_commands(commands: list[Command], options: ImportOptions, result: ImportedConfig) -> None:
    """Read a script that is recognised by name or arguments, or only its launch."""
    last, context = commands[-1], options.surroundings(ACCELERATE_PROGRAM)
    scripts = {command.script for command in commands}
    if last.arguments_file is not None:
        _read_arguments(last, result)
    known = is_example(last.script)
    whose = None if known else find_program(last.script, last.arguments)
    if len(commands) > 1 and (whose != "diffsynth" or len(scripts) > 1):
        raise PipelineError(
            f"--command: {len(commands)} commands, {', '.join(sorted(scripts))}",
            hint="paste one; only DiffSynth-Studio's data_process and train are one run",
        )
    if last.script.rpartition("/")[2] == PEFT_NAME:
        _read_script(last, result, options)
    elif known:
        launch = _launch_config(last, result)
        context = _own_launcher(last, result, context)
        read_example(last.arguments, launch, last.script, result, context)
    elif whose == "diffsynth":
        launch = _launch_config(last, result)
        for name, value in [flag for one in commands[:-1] for flag in one.flags.items()]:
            result.ignore(name, value, "the cache stage launches no processes")
        given = [command.arguments for command in commands]
        read_diffsynth(given, launch, last.script, result, _own_launcher(last, result, context))
    elif whose in (None, "trainer") and _names_config(last):
        _read_config_alone(last, result, options)
    elif whose in ("trainer", "simpletuner"):
        context = _own_launcher(last, result, context)
        if last.launcher == "accelerate":
            context = _accelerate_processes(last, result, context)
        if whose == "trainer":
            read_trainer(last.arguments, last.script, result, context)
        else:
            read_simpletuner(last.arguments, Path(last.script), result, context)
    elif [name for name in last.arguments if not result.is_skipped(name, last.arguments[name])]:
        raise unknown_script(last.script)
    else:
        config, path = _launch_config(last, result)
        read_accelerate(config, path, result, _own_launcher(last, result, context))


def _read_arguments(command: Command, result: ImportedConfig) -> None:
    """Read the one file that HfArgumentParser takes in the place of flags."""
    file = str(command.arguments_file)
    path = find_file(file, None)
    command.arguments = load_json(path) if path.suffix == ".json" else load_yaml(path)
    result.note("kept", "arguments", file, "read below")


def _names_config(command: Command) -> bool:
    """Return whether a script has DeepSpeed's arguments: `--deepspeed --deepspeed_config FILE`."""
    return "deepspeed_config" in command.arguments and not (
        isinstance(command.arguments.get("deepspeed"), str)
        or "model_name_or_path" in command.arguments
    )


def _read_config_alone(command: Command, result: ImportedConfig, options: ImportOptions) -> None:
    """Read the DeepSpeed file of an unknown script."""
    arguments = dict(command.arguments)
    file = str(arguments.pop("deepspeed_config"))
    result.note("kept", "deepspeed_config", file, "read below", "launch")
    if arguments.pop("deepspeed", False):
        result.note("kept", "deepspeed", True, "", "launch.preset")
    for name in [name for name in arguments if not result.is_skipped(name, arguments[name])]:
        result.problems.append(unknown_key(command.script, name, [*DEEPSPEED_ARGUMENTS]))
    context = _own_launcher(command, result, options.surroundings(ACCELERATE_PROGRAM))
    read_deepspeed(load_deepspeed(file, None)[1], file, result, context)


def _read_script(command: Command, result: ImportedConfig, options: ImportOptions) -> None:
    """Read PEFT's script, whose values are in its code."""
    if command.arguments:
        raise unknown_key(command.script, next(iter(command.arguments)), [])
    result.assume("run", "bart-large", "named by its model")
    config, path = _launch_config(command, result)
    read_accelerate(config, path, result, options.surroundings(PEFT_PROGRAM))
    for ours, value in PEFT_SCRIPT.items():
        if ours not in result.values:
            result.assume(ours, value, "in the code of the script")


def _launch_config(command: Command, result: ImportedConfig) -> tuple[dict[str, Any], Path | None]:
    """Merge accelerate's YAML with the launcher's flags; return the result and the YAML's path."""
    if command.launcher != "accelerate":
        count, _ = processes(command)
        kind = "MULTI_GPU" if count and count > 1 else "NO"
        return {"distributed_type": kind, "num_processes": count}, None
    flags = dict(command.flags)
    file = flags.pop("config_file", None)
    path = named_file(str(file)) if file is not None else cached_config()
    config: dict[str, Any] = {}
    if path is not None:
        config = load_yaml(path)
        note_repeated_keys(path, result)
        reason = "read below" if file is not None else "accelerate reads it where none is named"
        result.note("kept", "config_file", str(path), reason, "launch")
    kinds = {name: flags.pop(name, False) for name in ("use_deepspeed", "multi_gpu")}
    threads = flags.pop("num_cpu_threads_per_process", None)
    own = [n for n in flags if n in LAUNCH_FLAGS and not n.startswith("dynamo_")]
    where = "accelerate launch"
    read_keys({name: flags.pop(name) for name in own}, LAUNCH_FLAGS, where, result)
    merged = flags_as_config(flags, config)
    plugin = any(name in DEEPSPEED_FLAGS for name in flags)
    if kinds["use_deepspeed"] or (plugin and not config):
        merged["distributed_type"] = "DEEPSPEED"
    elif kinds["multi_gpu"]:
        merged["distributed_type"] = "MULTI_GPU"
    elif "distributed_type" not in merged:
        several = str(merged.get("num_processes", 1)) not in ("1", "-1")
        merged["distributed_type"] = "MULTI_GPU" if several else "NO"
    for name, given in kinds.items():
        if given:
            result.note("kept", name, True, "", "launch.preset")
    if threads is not None:
        row = {"num_cpu_threads_per_process": threads}
        for name, count in read_keys(row, LAUNCH_FLAGS, where, result).items():
            result.keep(name, count, f"launch.{name}")
    return merged, path


def _own_launcher(
    command: Command, result: ImportedConfig, context: SurroundingSettings
) -> SurroundingSettings:
    """Read flags of torchrun and deepspeed; accelerate's are part of its configuration."""
    if command.launcher == "accelerate":
        return context
    flags = read_keys(command.flags, FLAGS[command.launcher], command.launcher, result)
    count, reason = processes(command)
    if count is None:
        return context
    if context.processes.value not in (None, count):
        raise PipelineError(
            f"{reason}, but --num-processes says {context.processes.value}",
            hint="let both say the same",
        )
    for name in ("nproc_per_node", "num_gpus"):
        if name in flags:
            result.keep(name, flags[name], "launch.num_processes", count)
    if "master_port" in flags:
        number = port(flags["master_port"])
        if number is None:
            result.ignore("master_port", flags["master_port"], "no port: a free one is taken")
        else:
            result.keep("master_port", flags["master_port"], "launch.main_process_port", number)
    return replace(context, processes=Part(count, reason))


def _accelerate_processes(
    command: Command, result: ImportedConfig, context: SurroundingSettings
) -> SurroundingSettings:
    """Read accelerate's launcher for a trainer with its own DeepSpeed argument.

    If the launcher has a DeepSpeed configuration, the trainer receives it.
    """
    config, path = _launch_config(command, result)
    deepspeed = deepspeed_of(config, path)
    scratch = ImportedConfig(skip=result.skip)
    plain = {name: value for name, value in config.items() if name != "deepspeed_config"}
    if deepspeed is not None:
        plain["distributed_type"] = "MULTI_GPU"
        result.note("kept", "distributed_type", "DEEPSPEED", "read below", "launch.preset")
    read_accelerate(plain, path, scratch, replace(context, program=RUN))
    result.problems += scratch.problems
    for note in scratch.notes:
        if note.ours not in ("launch.preset", "launch.mixed_precision") or (
            note.given is not None and note.key != "distributed_type"
        ):
            result.notes.append(note)
    precision = scratch.values.get("launch.mixed_precision")
    if config.get("mixed_precision") is not None:
        context = context.with_precision(precision, "mixed_precision")
    count = scratch.values["launch.num_processes"]
    for ours in ("launch.num_processes", "launch.dynamo_backend", "launch.dynamo_mode"):
        if ours in scratch.values:
            result.values[ours] = scratch.values[ours]
    return replace(context, processes=Part(count, "num_processes"), accelerate_deepspeed=deepspeed)
