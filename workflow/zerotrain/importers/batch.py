"""Batch sizes: micro batch x accumulation x processes = global batch."""

from __future__ import annotations

import math
from typing import Any

from zerotrain.errors import PipelineError
from zerotrain.importers.imported_config import AUTO, ImportedConfig
from zerotrain.importers.program import RUN, Part, Program, SurroundingSettings

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"


def read_batch(flat: dict[str, Any], result: ImportedConfig, context: SurroundingSettings) -> None:
    """Derive the four numbers as DeepSpeed does if one is missing.

    Raises:
        PipelineError: the numbers do not multiply out; the message names them.
    """
    program, world, micro_batch = context.program, context.processes, context.micro_batch
    train, micro, steps = (_given(flat, key) for key in (TRAIN, MICRO, STEPS))
    if program is RUN and train.value is None and (micro.value is None or steps.value is None):
        _leave_to_run(flat, result, micro, steps, world)
        return
    if micro_batch is not None:
        if micro.value not in (None, micro_batch):
            raise PipelineError(
                f"{MICRO} is {micro.value}, and {micro_batch} is given next to the file",
                hint="leave --micro-batch-size out",
            )
        micro = Part(micro_batch, "--micro-batch-size")
    derivable = train.value is not None and micro.value is not None
    if steps.value is None and not (derivable and world.value is not None and STEPS not in flat):
        steps = _of(program, "train.gradient_accumulation_steps", Part(1, "one, where none is set"))
    if world.value is None and derivable:
        world = Part(
            _quotient(train, micro, steps, world),
            f"{TRAIN} {train.value} / {micro.value} a process / {steps.value} accumulations",
        )
    elif world.value is None:
        world = Part(1, "one process, where nothing says how many")
    if steps.value is None:
        steps = Part(
            _quotient(train, micro, steps, world),
            f"{TRAIN} {train.value} / {micro.value} a process / {world.value} processes",
        )
    if micro.value is None and train.value is not None:
        micro = Part(_quotient(train, micro, steps, world))
    elif micro.value is None:
        unknown = "one sample, where only the script's data loader knows: see --micro-batch-size"
        micro = _of(program, "train.global_batch_size", Part(1, unknown))
    total = _product(micro, steps, world)
    if train.value not in (None, total):
        raise _inconsistent(train, micro, steps, world)
    _note(flat, result, micro, steps, world, total)


def _given(flat: dict[str, Any], key: str) -> Part:
    value = flat.get(key)
    if value in (None, AUTO):
        return Part(None)
    if value < 1:
        raise PipelineError(f"{key} is {value}", hint="give a whole number from 1 on")
    return Part(value, key)


def _of(program: Program, ours: str, otherwise: Part) -> Part:
    found = program.value(ours)
    if found is None:
        return otherwise
    if not isinstance(found[0], int) or found[0] < 1:
        raise PipelineError(f"{found[1]}: {found[0]!r}", hint="give a whole number from 1 on")
    return Part(*found)


def _product(*parts: Part) -> int:
    """Multiply the known parts."""
    return math.prod(part.value for part in parts if part.value is not None)


def _quotient(train: Part, micro: Part, steps: Part, world: Part) -> int:
    """Derive the unknown part."""
    whole, parts = train.value or 0, _product(micro, steps, world)
    if whole % parts:
        raise _inconsistent(train, micro, steps, world)
    return whole // parts


def _inconsistent(train: Part, micro: Part, steps: Part, world: Part) -> PipelineError:
    shown = [str(part.value) if part.value else "?" for part in (micro, steps, world)]
    return PipelineError(
        f"{TRAIN} {train.value} is not {shown[0]} (micro batch) x {shown[1]} (accumulation) x "
        f"{shown[2]} (processes): the known ones make {_product(micro, steps, world)}",
        hint="change one of them; the global batch is what an optimizer step sees",
    )


def _note(
    flat: dict[str, Any], result: ImportedConfig, micro: Part, steps: Part, world: Part, total: int
) -> None:
    product = f"{micro.value} a process x {steps.value} accumulated x {world.value} process"
    product += "es" if world.value != 1 else ""
    for key in (TRAIN, MICRO):
        if flat.get(key) == AUTO:
            reason = f"{product}; {micro.reason}" if micro.reason else product
            result.resolve(key, "train.global_batch_size", total, reason)
        elif key in flat:
            result.keep(key, flat[key], "train.global_batch_size", total, product)
    if TRAIN not in flat and MICRO not in flat:
        result.assume("train.global_batch_size", total, f"{product}; {micro.reason}")
    ours = "train.gradient_accumulation_steps"
    if flat.get(STEPS) == AUTO:
        result.resolve(STEPS, ours, steps.value, steps.reason)
    elif STEPS in flat:
        result.keep(STEPS, flat[STEPS], ours)
    else:
        result.assume(ours, steps.value, steps.reason)
    if "launch.num_processes" not in result.values:
        result.assume("launch.num_processes", world.value, world.reason)


def _leave_to_run(
    flat: dict[str, Any], result: ImportedConfig, micro: Part, steps: Part, world: Part
) -> None:
    """Leave the global batch to the run; the file may set the accumulation."""
    if steps.value is not None:
        result.keep(STEPS, steps.value, "train.gradient_accumulation_steps")
    for key in (TRAIN, MICRO, STEPS):
        if flat.get(key) == AUTO:
            result.note("resolved", key, AUTO, "the run's own train values")
    if micro.value is not None:
        raise PipelineError(
            f"{MICRO} is {micro.value}, but {STEPS} is left open",
            hint=f"write {STEPS} or {TRAIN} into the file, or let the run say all of them",
        )
