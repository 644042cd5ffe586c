"""Import of DeepSpeed's JSON into launch and train."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerotrain.errors import PipelineError
from zerotrain.importers.imported_config import AUTO, ImportedConfig
from zerotrain.importers.key_values import read_keys, without_auto
from zerotrain.importers.program import PRESETS, RUN, Program, SurroundingSettings
from zerotrain.importers.schedule import flag_schedule, read_schedule
from zerotrain.importers.step import (
    read_batch,
    read_loss_scale,
    read_optimizer,
    read_precision,
)
from zerotrain.launch.keys import DEEPSPEED, DEEPSPEED_ALIASES, ZERO
from zerotrain.launch.preset import Preset, read_preset
from zerotrain.launch.zero import zero_optimization
from zerotrain.models.sizes import model_sizes

HIDDEN = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
"""Keys whose "auto" accelerate and the Trainer derive from the model's hidden_size."""

CHECKPOINTING = ("partition_activations", "cpu_checkpointing")


def read_deepspeed(
    config: Mapping[str, Any], where: str, result: ImportedConfig, context: SurroundingSettings
) -> None:
    """Read a DeepSpeed configuration.

    Args:
        config: The JSON's content; another program would replace "auto" by a value.
        where: Its name in messages.
        result: Receives keys of launch and train.
        context: The surrounding settings.

    Raises:
        PipelineError: a key or value is not supported, or values contradict each other.
    """
    renamed = _renamed(config)
    comments = [name for name in renamed if name.startswith("_")]
    result.ignore_all(renamed, comments, "a comment: DeepSpeed reads no such key")
    flat = read_keys(renamed, DEEPSPEED, where, result, auto_under="")
    preset = read_zero(flat, result, context.presets, context.offload_path)
    precision = read_precision(flat, result, context)
    read_loss_scale(flat, result, precision)
    read_batch(flat, result, context)
    _read_clipping(flat, result, context.program)
    read_optimizer(flat, result, context.program)
    read_schedule(flat, result, context.program)
    _read_checkpointing(flat, result, preset)
    _read_passed(flat, result, preset, precision, where)
    if preset.engine == "deepspeed" and ZERO + "reduce_bucket_size" not in flat:
        result.note(
            "default", ZERO + "reduce_bucket_size", None,
            "derived from the model, at most 5e7 elements; DeepSpeed's own of 5e8 costs "
            "2 GB a bucket and changes no number",
        )  # fmt: skip


def _renamed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration under the names that DeepSpeed writes, of those that it reads."""
    found = {DEEPSPEED_ALIASES.get(name, name): value for name, value in config.items()}
    if isinstance(zero := found.get(ZERO[:-1]), Mapping):
        spelled = {name: f"stage3_{name}" for name in zero}
        found[ZERO[:-1]] = {
            spelled[name] if ZERO + spelled[name] in DEEPSPEED else name: value
            for name, value in zero.items()
        }
    return found


def read_plain(result: ImportedConfig, context: SurroundingSettings) -> None:
    """Read the settings of a program without DeepSpeed.

    Raises:
        PipelineError: numbers do not multiply out, or zerotrain does not have the schedule.
    """
    result.assume("launch.preset", "torch", "no DeepSpeed")
    read_precision({}, result, context)
    if context.program is RUN:
        return
    read_batch({}, result, context)
    found = context.program.value("train.max_grad_norm")
    if found is not None:
        result.assume("train.max_grad_norm", float(found[0]), found[1])
    read_optimizer({}, result, context.program)
    if context.program.name == "SimpleTuner":  # under DeepSpeed its schedule is another
        flag_schedule(result, context.program)
    else:
        read_schedule({}, result, context.program)


def _read_clipping(flat: dict[str, Any], result: ImportedConfig, program: Program) -> None:
    key, ours = "gradient_clipping", "train.max_grad_norm"
    given = flat.get(key)
    if given == AUTO and program is RUN:
        result.note("resolved", key, AUTO, "the run's own", ours)
    elif given == AUTO:
        found = program.value(ours) if program.name == "HF Trainer" else None
        value, reason = found or (1.0, "accelerate's value for auto")
        result.resolve(key, ours, float(value), reason)
    elif given is None and program is not RUN:
        result.assume(
            ours, 1.0, "DeepSpeed clips at 1.0 if the file does not set it; 0 disables clipping"
        )
    elif given is not None:
        if given < 0:
            raise PipelineError(f"{key} is {given}", hint="give a norm, or 0 for none")
        result.keep(key, given, ours, float(given))


def _read_checkpointing(flat: dict[str, Any], result: ImportedConfig, preset: Preset) -> None:
    for name in CHECKPOINTING:
        key = f"activation_checkpointing.{name}"
        if key not in flat:
            continue
        if flat[key] is True and preset.engine == "deepspeed":
            result.keep(key, True, f"launch.{name}")
        elif flat[key] is True:
            result.drop(key, True, "only under DeepSpeed, and its stage 0 is plain PyTorch here")
        else:
            result.note("kept", key, flat[key], "off, as by default", f"launch.{name}")


def _read_passed(
    flat: dict[str, Any], result: ImportedConfig, preset: Preset, precision: str, where: str
) -> None:
    """Set the keys that are passed to deepspeed.json unchanged, if they differ from it."""
    for key, value in flat.items():
        row = DEEPSPEED.get(key)
        if row is None or row.fate != "passed_through":
            continue
        target = next((t for t in ("offload_optimizer", "offload_param") if f".{t}." in key), "")
        device = result.values.get(f"launch.{target}", getattr(preset, target, "none"))
        if preset.engine == "torch":
            result.drop(key, value, "stage 0 is plain PyTorch here, without a DeepSpeed file")
        elif target and device == "none":
            result.ignore(key, value, f"there is no {target}")
        elif ".stage3_" in key and preset.zero_stage < 3:
            result.ignore(key, value, "a key of stage 3")
        elif key.partition(".")[0] in ("fp16", "bf16") and precision != key.partition(".")[0]:
            result.ignore(key, value, f"{key.partition('.')[0]} is not on")
        elif value == AUTO:
            result.note("resolved", key, AUTO, _left_open(key), row.ours)
        elif isinstance(value, int | float) and value < 0:
            raise PipelineError(f"{where}: {key} is {value}", hint="give a number from 0 on")
        elif (stands := stands_anyway(preset, key)) == (True, value):
            result.note("kept", key, value, f"preset {preset.name}", row.ours)
        elif not stands[0] and row.default is not None and value == row.default:
            result.note("kept", key, value, "DeepSpeed's default", row.ours)
        else:
            result.keep(key, value, row.ours, without_auto(value))


def _left_open(key: str) -> str:
    if key.rpartition(".")[2] in HIDDEN:
        return (
            "ours, from the preset and the model's sizes; others take hidden_size, which no "
            "U-Net has"
        )
    return "nothing fills it: ours"


SHIPPED = Path(__file__).parents[3] / PRESETS
"""Presets of the installation, for imports outside a project."""
BY_STAGE = {
    0: ("torch",),
    1: ("zero1",),
    2: ("zero2", "zero2_offload"),
    3: ("zero3", "zero3_offload", "zero3_nvme"),
}
"""Preset files by ZeRO stage, the simplest first."""

DEVICES = ("none", "cpu", "nvme")
TARGETS = ("offload_optimizer", "offload_param")
STAGE = ZERO + "stage"
ANY_MODEL = model_sizes({"": [1]})


def read_zero(
    flat: dict[str, Any], result: ImportedConfig, presets: Path, path: str | None
) -> Preset:
    """Set `launch.preset` by stage and offload.

    Args:
        flat: The file's keys.
        result: Receives preset, offload_optimizer, offload_param and offload_path.
        presets: Folder of the preset files.
        path: Folder for NVMe offload, if the file names none.

    Raises:
        PipelineError: there is no such stage or device, or NVMe without a folder.
    """
    stage = flat.get(STAGE, 0)
    if stage == AUTO:
        stage = 2  # accelerate's default
    if stage not in BY_STAGE:
        raise PipelineError(f"{STAGE} is {stage!r}", hint="there are stages 0, 1, 2 and 3")
    devices = {target: _device(flat, result, target, stage) for target in TARGETS}
    presets = presets if presets.is_dir() else SHIPPED
    candidates = [read_preset(presets / f"{name}.yaml") for name in BY_STAGE[stage]]
    preset = min(candidates, key=lambda preset: _distance(preset, devices))
    _note_stage(flat, result, stage, preset)
    for target, device in devices.items():
        key, ours = f"{ZERO}{target}.device", f"launch.{target}"
        shown = flat.get(key)
        if device == getattr(preset, target):
            if shown is not None and shown == device:
                result.note("kept", key, shown, f"preset {preset.name}", ours)
            elif shown == AUTO:
                result.note("resolved", key, shown, "nothing is offloaded unless asked for", ours)
        else:
            result.keep(key, device, ours)
    _note_path(flat, result, devices, path)
    return preset


def _device(flat: dict[str, Any], result: ImportedConfig, target: str, stage: int) -> str:
    """Return the offload device of the target that the stage allows."""
    key = f"{ZERO}{target}.device"
    old = ZERO + {"offload_optimizer": "cpu_offload", "offload_param": "cpu_offload_param"}[target]
    if old in flat:
        given = flat.pop(old)
        if given is True:
            flat.setdefault(key, "cpu")
            result.note("changed", old, given, f"the old form of {target}: cpu", f"launch.{target}")
        else:
            result.ignore(old, given, "nothing is offloaded by it")
    device = str(flat.get(key, "none")).casefold()
    device = "none" if device == AUTO else device
    if device not in DEVICES:
        raise PipelineError(f"{key} is {device!r}", hint=f"one of {', '.join(DEVICES)}")
    if device == "none":
        return device
    if stage == 0 or (target == "offload_param" and stage < 3):
        what = "parameters stay whole below stage 3" if stage else "nothing is sharded at stage 0"
        result.drop(key, flat.pop(key), f"{what}, so there is nothing to offload")
        return "none"
    if device == "nvme" and stage < 3:
        result.note("changed", key, flat.pop(key), "DeepSpeed swaps to NVMe at stage 3 only: cpu")
        return "cpu"
    return device


def _distance(preset: Preset, devices: dict[str, str]) -> int:
    return sum(getattr(preset, target) != device for target, device in devices.items())


def _note_stage(flat: dict[str, Any], result: ImportedConfig, stage: int, preset: Preset) -> None:
    given = flat.get(STAGE)
    reason = "the nearest preset by stage and offload"
    if stage == 0:
        reason = "stage 0 shards nothing: plain PyTorch does the same"
    if given is None:
        result.assume("launch.preset", preset.name, reason)
    elif given == AUTO:
        result.resolve(STAGE, "launch.preset", preset.name, "accelerate's default is stage 2")
    else:
        result.put("kept", STAGE, given, "launch.preset", preset.name, reason)


def _note_path(
    flat: dict[str, Any], result: ImportedConfig, devices: dict[str, str], path: str | None
) -> None:
    """Set one folder for both targets."""
    for target in TARGETS:
        key = f"{ZERO}{target}.nvme_path"
        given = flat.get(key)
        if devices[target] != "nvme":
            if given is not None:
                result.ignore(key, given, "nothing of it goes to NVMe")
            continue
        if given in (None, AUTO, "none"):
            if path is None:
                raise PipelineError(
                    f"{key} is missing, and {target} is nvme",
                    hint="name a folder on a fast disk there",
                )
            continue
        if result.values.get("launch.offload_path", given) != given:
            result.note("changed", key, given, "one folder holds what both targets swap")
        else:
            result.keep(key, given, "launch.offload_path")
    if "nvme" in devices.values() and "launch.offload_path" not in result.values:
        result.keep("offload_param_path", path, "launch.offload_path")
    elif path is not None and "launch.offload_path" not in result.values:
        result.ignore("offload_param_path", path, "nothing goes to NVMe")


def stands_anyway(preset: Preset, name: str) -> tuple[bool, Any]:
    """Return whether the preset sets this key for every model, and its value."""
    written = zero_optimization(
        preset.zero_stage, preset.offload_optimizer, preset.offload_param, None, 1, ANY_MODEL
    )
    value, source, _ = written.get(name.removeprefix(ZERO), (None, "", ""))
    return source == "default", value
