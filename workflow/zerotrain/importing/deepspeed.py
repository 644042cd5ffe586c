"""DeepSpeed's JSON, read into launch and train."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zerotrain.errors import PipelineError
from zerotrain.importing.batch import UNKNOWN, Part, read_batch
from zerotrain.importing.draft import AUTO, Draft, read_keys
from zerotrain.importing.keys_deepspeed import ALIASES, DEEPSPEED, ZERO
from zerotrain.importing.optimizer import read_optimizer, without_auto
from zerotrain.importing.precision import Ask, read_loss_scale, read_precision
from zerotrain.importing.program import RUN, Program
from zerotrain.importing.schedule import flag_schedule, read_schedule
from zerotrain.importing.zero import PRESETS, read_zero, stands_anyway
from zerotrain.launch.preset import Preset

HIDDEN = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
"""Keys whose "auto" accelerate and the Trainer take from the model's hidden_size."""

CHECKPOINTING = (
    "partition_activations",
    "cpu_checkpointing",
    "contiguous_memory_optimization",
)


@dataclass(frozen=True)
class Beside:
    """What is said beside a DeepSpeed file."""

    program: Program
    processes: Part = UNKNOWN
    precision: str | None = None
    precision_source: str = "--precision"
    precision_default: tuple[str, str] = ("no", "fp32, where nothing turns another on")
    micro_batch: int | None = None
    offload_path: str | None = None
    ask: Ask | None = None
    presets: Path = PRESETS

    def with_precision(self, precision: str | None, source: str) -> Beside:
        """The same, unless something said a precision already.

        Raises:
            PipelineError: it said another one.
        """
        if precision is None:
            return self
        if self.precision not in (None, precision):
            raise PipelineError(
                f"{source} is {precision}, but {self.precision_source} says {self.precision}",
                hint="let both say the same",
            )
        return replace(self, precision=precision, precision_source=source)


def load_json(path: Path) -> dict[str, Any]:
    """A JSON file of keys.

    Raises:
        PipelineError: there is none, it is no JSON, or a key stands there twice.
    """
    try:
        found = json.loads(path.read_text(), object_pairs_hook=_once(path))
    except OSError as error:
        raise PipelineError(
            f"{path}: cannot be read: {error.strerror}", hint="name a file that is there"
        ) from error
    except (ValueError, RecursionError) as error:
        raise PipelineError(
            f"{path}: not valid JSON: {error}", hint="check commas, quotes and brackets"
        ) from error
    if not isinstance(found, dict):
        raise PipelineError(
            f"{path}: holds {type(found).__name__}, not keys with values",
            hint="name a DeepSpeed configuration",
        )
    return found


def _once(path: Path) -> Any:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) < len(items):
            names = [name for name, _ in items]
            twice = next(name for name in names if names.count(name) > 1)
            raise PipelineError(f"{path}: {twice} stands twice", hint="take one of them out")
        return found

    return pairs


def read_deepspeed(config: Mapping[str, Any], where: str, draft: Draft, beside: Beside) -> None:
    """Read a DeepSpeed configuration.

    Args:
        config: As its JSON has it; "auto" stands where another program would fill a value.
        where: Names it in messages.
        draft: Gets keys of launch and train.
        beside: What is known from elsewhere.

    Raises:
        PipelineError: a key or value that cannot be taken, or values that contradict each other.
    """
    renamed = {ALIASES.get(name, name): value for name, value in config.items()}
    flat = read_keys(renamed, DEEPSPEED, where, draft, auto_under="")
    preset = read_zero(flat, draft, beside.presets, beside.offload_path)
    precision = _read_precision(flat, draft, beside)
    read_loss_scale(flat, draft, precision)
    read_batch(flat, draft, beside.program, beside.processes, beside.micro_batch)
    _read_clipping(flat, draft, beside.program)
    read_optimizer(flat, draft, beside.program)
    read_schedule(flat, draft, beside.program)
    _read_checkpointing(flat, draft, preset)
    _read_passed(flat, draft, preset, precision, where)
    if preset.engine == "deepspeed" and ZERO + "reduce_bucket_size" not in flat:
        draft.say(
            "default", ZERO + "reduce_bucket_size", None,
            "derived from the model, at most 5e7 elements; DeepSpeed's own of 5e8 costs "
            "2 GB a bucket and changes no number",
        )  # fmt: skip


def read_plain(draft: Draft, beside: Beside) -> None:
    """What a program trains without DeepSpeed.

    Raises:
        PipelineError: numbers that do not multiply out, or a schedule that zerotrain has not.
    """
    draft.default("launch.preset", "torch", "no DeepSpeed")
    _read_precision({}, draft, beside)
    if beside.program is RUN:
        return
    read_batch({}, draft, beside.program, beside.processes, beside.micro_batch)
    found = beside.program.value("train.max_grad_norm")
    if found is not None:
        draft.default("train.max_grad_norm", float(found[0]), found[1])
    read_optimizer({}, draft, beside.program)
    if beside.program.value("train.lr_scheduler") is not None:
        flag_schedule(draft, beside.program)
    else:
        read_schedule({}, draft, beside.program)


def _read_precision(flat: dict[str, Any], draft: Draft, beside: Beside) -> str:
    return read_precision(
        flat, draft, beside.precision, beside.precision_source, beside.precision_default,
        beside.ask,
    )  # fmt: skip


def _read_clipping(flat: dict[str, Any], draft: Draft, program: Program) -> None:
    key, ours = "gradient_clipping", "train.max_grad_norm"
    given = flat.get(key)
    if given == AUTO and program is RUN:
        draft.say("resolved", key, AUTO, "the run's own", ours)
    elif given == AUTO:
        found = program.value(ours) if program.name == "HF Trainer" else None
        value, reason = found or (1.0, "accelerate's value for auto")
        draft.resolve(key, ours, float(value), reason)
    elif given is None and program is not RUN:
        draft.default(ours, 1.0, "DeepSpeed clips at 1.0 where the file says nothing; 0 is none")
    elif given is not None:
        if given < 0:
            raise PipelineError(f"{key} is {given}", hint="give a norm, or 0 for none")
        draft.keep(key, given, ours, float(given))


def _read_checkpointing(flat: dict[str, Any], draft: Draft, preset: Preset) -> None:
    for name in CHECKPOINTING:
        key = f"activation_checkpointing.{name}"
        if key not in flat:
            continue
        if flat[key] is True and preset.engine == "deepspeed":
            draft.keep(key, True, f"launch.{name}")
        elif flat[key] is True:
            draft.leave(key, True, "only under DeepSpeed, and its stage 0 is plain PyTorch here")
        else:
            draft.say("kept", key, flat[key], "off, as by default", f"launch.{name}")


def _read_passed(
    flat: dict[str, Any], draft: Draft, preset: Preset, precision: str, where: str
) -> None:
    """Keys that go into deepspeed.json as they are, where they differ from what stands there."""
    for key, value in flat.items():
        row = DEEPSPEED.get(key)
        if row is None or row.fate != "passed on":
            continue
        target = next((t for t in ("offload_optimizer", "offload_param") if f".{t}." in key), "")
        device = draft.values.get(f"launch.{target}", getattr(preset, target, "none"))
        if preset.engine == "torch":
            draft.leave(key, value, "stage 0 is plain PyTorch here, without a DeepSpeed file")
        elif target and device == "none":
            draft.ignore(key, value, f"there is no {target}")
        elif ".stage3_" in key and preset.zero_stage < 3:
            draft.ignore(key, value, "a key of stage 3")
        elif key.partition(".")[0] in ("fp16", "bf16") and precision != key.partition(".")[0]:
            draft.ignore(key, value, f"{key.partition('.')[0]} is not on")
        elif value == AUTO:
            draft.say("resolved", key, AUTO, _left_open(key), row.ours)
        elif isinstance(value, int | float) and value < 0:
            raise PipelineError(f"{where}: {key} is {value}", hint="give a number from 0 on")
        elif (stands := stands_anyway(preset, key)) == (True, value):
            draft.say("kept", key, value, f"preset {preset.name}", row.ours)
        elif not stands[0] and row.default is not None and value == row.default:
            draft.say("kept", key, value, "DeepSpeed's default", row.ours)
        else:
            draft.keep(key, value, row.ours, without_auto(value))


def _left_open(key: str) -> str:
    if key.rpartition(".")[2] in HIDDEN:
        return (
            "ours, from the preset and the model's sizes; others take hidden_size, which no "
            "U-Net has"
        )
    return "nothing fills it: ours"
