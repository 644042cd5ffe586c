"""Pasted command lines: what is launched, how, and what its script is asked to do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from zerotrain.errors import PipelineError
from zerotrain.importing.accelerate import (
    cached_config,
    flags_as_config,
    load_yaml,
    read_accelerate,
)
from zerotrain.importing.batch import Part
from zerotrain.importing.command import Command, parse_commands, port, processes, script_table
from zerotrain.importing.deepspeed import Beside
from zerotrain.importing.diffsynth import read_diffsynth
from zerotrain.importing.diffusers_examples import is_example, read_example
from zerotrain.importing.draft import Draft, read_keys
from zerotrain.importing.keys import unknown_key
from zerotrain.importing.keys_accelerate import DEEPSPEED_FLAGS, LAUNCH_FLAGS, TORCHRUN_FLAGS
from zerotrain.importing.keys_programs import (
    DIFFSYNTH,
    PEFT_SCRIPT,
    PEFT_SCRIPT_MICRO_BATCH,
    SIMPLETUNER,
    TRAINER,
)
from zerotrain.importing.program import ACCELERATE as ACCELERATE_PROGRAM
from zerotrain.importing.program import RUN, Program, trainer
from zerotrain.importing.reading import Asked, Imported, check
from zerotrain.importing.simpletuner import read_simpletuner
from zerotrain.importing.trainer import read_trainer

PEFT_NAME = "peft_lora_seq2seq_accelerate_ds_zero3_offload.py"
PEFT_PROGRAM = Program(
    "the script",
    fixed={
        "train.optimizer": "adamw",
        "train.learning_rate": PEFT_SCRIPT["train.learning_rate"],
        "train.adam_weight_decay": PEFT_SCRIPT["train.adam_weight_decay"],
        "train.global_batch_size": PEFT_SCRIPT_MICRO_BATCH,
        "train.lr_scheduler": "linear",
    },
)
SCRIPTS = {"trainer": TRAINER, "diffsynth": DIFFSYNTH, "simpletuner": SIMPLETUNER}


def import_command(text: str, asked: Asked | None = None) -> Imported:
    """Read one pasted command line, or the two of DiffSynth-Studio's split training.

    Raises:
        PipelineError: no such command, or a flag that cannot be taken.
    """
    asked, draft = asked or Asked(), Draft()
    commands = parse_commands(text)
    last = commands[-1]
    scripts = {command.script for command in commands}
    whose = script_table(last, SCRIPTS)
    if len(commands) > 1 and (whose != "diffsynth" or len(scripts) > 1):
        raise PipelineError(
            f"--command: {len(commands)} commands, {', '.join(sorted(scripts))}",
            hint="paste one; only DiffSynth-Studio's data_process and train are one run",
        )
    if last.script.rpartition("/")[2] == PEFT_NAME:
        _read_script(last, draft, asked)
    elif is_example(last.script):
        launch = _launch_config(last, draft)
        beside = _torchrun(last, draft, asked.beside(ACCELERATE_PROGRAM))
        read_example(last.arguments, launch, last.script, draft, beside)
    elif whose == "diffsynth":
        launch = _launch_config(last, draft)
        _note_other_launches(commands[:-1], draft)
        beside = asked.beside(ACCELERATE_PROGRAM)
        given = [command.arguments for command in commands]
        read_diffsynth(given, launch, last.script, draft, _torchrun(last, draft, beside))
    elif whose == "trainer":
        beside = _torchrun(last, draft, asked.beside(trainer({})))
        if last.launcher == "accelerate":
            beside = _accelerate_processes(last, draft, beside)
        read_trainer(last.arguments, last.script, draft, beside)
    elif whose == "simpletuner":
        beside = _torchrun(last, draft, asked.beside(ACCELERATE_PROGRAM))
        if last.launcher == "accelerate":
            beside = _accelerate_processes(last, draft, beside)
        read_simpletuner(last.arguments, Path(last.script), draft, beside)
    elif last.arguments:
        known = {name for table in SCRIPTS.values() for name in table}
        raise unknown_key(last.script, next(iter(last.arguments)), sorted(known))
    else:
        config, path = _launch_config(last, draft)
        beside = _torchrun(last, draft, asked.beside(ACCELERATE_PROGRAM))
        read_accelerate(config, path, draft, beside)
    if last.log is not None:
        draft.ignore("> " + last.log, None, "rules write logs/")
    check(draft, last.script)
    return Imported(f"{last.launcher}, {last.script}", draft.values, draft.notes)


def _read_script(command: Command, draft: Draft, asked: Asked) -> None:
    """PEFT's script, which has its values in its code."""
    if command.arguments:
        raise unknown_key(command.script, next(iter(command.arguments)), [])
    draft.default("run", "bart-large", "named by its model")
    config, path = _launch_config(command, draft)
    read_accelerate(config, path, draft, asked.beside(PEFT_PROGRAM))
    for ours, value in PEFT_SCRIPT.items():
        if ours not in draft.values:
            draft.default(ours, value, "in the code of the script")


def _launch_config(command: Command, draft: Draft) -> tuple[dict[str, Any], Path | None]:
    """What accelerate's YAML and the flags of the launcher say together, and the YAML's path."""
    if command.launcher != "accelerate":
        count, _ = processes(command)
        kind = "MULTI_GPU" if count and count > 1 else "NO"
        return {"distributed_type": kind, "num_processes": count}, None
    flags = dict(command.flags)
    file = flags.pop("config_file", None)
    path = Path(file) if file is not None else cached_config()
    config: dict[str, Any] = {}
    if path is not None:
        config = load_yaml(path)
        reason = "read below" if file is not None else "accelerate reads it where none is named"
        draft.say("kept", "config_file", str(path), reason, "launch")
    kinds = {name: flags.pop(name, False) for name in ("use_deepspeed", "multi_gpu")}
    threads = flags.pop("num_cpu_threads_per_process", None)
    own = {name: value for name, value in flags.items() if name in LAUNCH_FLAGS}
    read_keys(own, LAUNCH_FLAGS, "accelerate launch", draft)
    for name in own:
        del flags[name]
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
            draft.say("kept", name, True, "", "launch.preset")
    if threads is not None:
        row = {"num_cpu_threads_per_process": threads}
        value = read_keys(row, LAUNCH_FLAGS, "accelerate launch", draft)
        for name, count in value.items():
            draft.keep(name, count, "launch.num_cpu_threads_per_process")
    return merged, path


def _note_other_launches(commands: list[Command], draft: Draft) -> None:
    """The launch of a preparing command: the cache stage has none."""
    for command in commands:
        for name, value in command.flags.items():
            draft.ignore(name, value, "the cache stage launches no processes")


def _torchrun(command: Command, draft: Draft, beside: Beside) -> Beside:
    """torchrun's flags."""
    if command.launcher != "torchrun":
        return beside
    flags = read_keys(command.flags, TORCHRUN_FLAGS, "torchrun", draft)
    count, reason = processes(command)
    if beside.processes.value not in (None, count):
        raise PipelineError(
            f"{reason}, but --num-processes says {beside.processes.value}",
            hint="let both say the same",
        )
    if "nproc_per_node" in flags:
        draft.keep("nproc_per_node", flags["nproc_per_node"], "launch.num_processes", count)
    if "master_port" in flags:
        number = port(flags["master_port"])
        if number is None:
            draft.ignore("master_port", flags["master_port"], "no port: a free one is taken")
        else:
            draft.keep("master_port", flags["master_port"], "launch.main_process_port", number)
    return replace(beside, processes=Part(count, reason))


def _accelerate_processes(command: Command, draft: Draft, beside: Beside) -> Beside:
    """accelerate's launcher before a trainer that has its own DeepSpeed argument."""
    config, path = _launch_config(command, draft)
    where = str(path or "accelerate launch")
    scratch = Draft()
    read_accelerate(config, path, scratch, replace(beside, program=RUN))
    for note in scratch.notes:
        if note.ours not in ("launch.preset", "launch.mixed_precision") or note.given is not None:
            draft.notes.append(note)
    precision = scratch.values.get("launch.mixed_precision")
    if config.get("mixed_precision") is not None:
        beside = beside.with_precision(precision, "mixed_precision")
    count = scratch.values["launch.num_processes"]
    draft.values["launch.num_processes"] = count
    if scratch.values["launch.preset"] != "torch":
        raise PipelineError(
            f"{where}: has its own DeepSpeed settings, beside those of the script",
            hint="import the two files one by one, or take the settings out of one of them",
        )
    return replace(beside, processes=Part(count, "num_processes"))
