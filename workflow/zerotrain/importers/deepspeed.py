"""Import of DeepSpeed's JSON into launch and train."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zerotrain.errors import PipelineError
from zerotrain.importers.batch import UNKNOWN, Part, read_batch
from zerotrain.importers.imported_config import AUTO, ImportedConfig
from zerotrain.importers.key_values import read_keys
from zerotrain.importers.optimizer import read_optimizer, without_auto
from zerotrain.importers.precision import Choose, read_loss_scale, read_precision
from zerotrain.importers.program import RUN, Program
from zerotrain.importers.schedule import flag_schedule, read_schedule
from zerotrain.importers.zero import PRESETS, read_zero, stands_anyway
from zerotrain.launch.keys import DEEPSPEED, DEEPSPEED_ALIASES, ZERO
from zerotrain.launch.preset import Preset

HIDDEN = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
"""Keys whose "auto" accelerate and the Trainer derive from the model's hidden_size."""

CHECKPOINTING = ("partition_activations", "cpu_checkpointing")


@dataclass(frozen=True)
class SurroundingSettings:
    """Settings that surround a DeepSpeed file."""

    program: Program
    processes: Part = UNKNOWN
    precision: str | None = None
    precision_source: str = "--precision"
    precision_default: tuple[str, str] = ("no", "fp32, where nothing turns another on")
    micro_batch: int | None = None
    offload_path: str | None = None
    choose: Choose | None = None
    presets: Path = PRESETS
    accelerate_deepspeed: tuple[str, dict[str, Any]] | None = None
    """The launcher's DeepSpeed configuration for a trainer without one: its name, its keys."""

    def with_precision(self, precision: str | None, source: str) -> SurroundingSettings:
        """Return a copy with a precision, if none is set.

        Raises:
            PipelineError: another precision is set.
        """
        if precision is None:
            return self
        if self.precision not in (None, precision):
            raise PipelineError(
                f"{source} is {precision}, but {self.precision_source} says {self.precision}",
                hint="let both say the same",
            )
        return replace(self, precision=precision, precision_source=source)


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
    precision = _read_precision(flat, result, context)
    read_loss_scale(flat, result, precision)
    read_batch(flat, result, context.program, context.processes, context.micro_batch)
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
    _read_precision({}, result, context)
    if context.program is RUN:
        return
    read_batch({}, result, context.program, context.processes, context.micro_batch)
    found = context.program.value("train.max_grad_norm")
    if found is not None:
        result.assume("train.max_grad_norm", float(found[0]), found[1])
    read_optimizer({}, result, context.program)
    if context.program.name == "SimpleTuner":  # under DeepSpeed its schedule is another
        flag_schedule(result, context.program)
    else:
        read_schedule({}, result, context.program)


def _read_precision(
    flat: dict[str, Any], result: ImportedConfig, context: SurroundingSettings
) -> str:
    return read_precision(
        flat, result, context.precision, context.precision_source, context.precision_default,
        choose=context.choose,
    )  # fmt: skip


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
