"""Checks that files of a checkpoint without DeepSpeed match their names, and are of one step."""

from __future__ import annotations

import contextlib
import math
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from zerotrain.errors import PipelineError
from zerotrain.machine.memory_errors import find_out_of_memory

AGAIN = "copy the checkpoint again, or use an older one"
STEP_FILES = ("trainer_state.json", "training_state.json")
"""Files in which HF's Trainer and SimpleTuner record `global_step`."""
GROUP_VALUES = ("lr", "eps", "weight_decay", "betas")
"""The values of a param group that are kept."""
MOMENTS = ("exp_avg", "exp_avg_sq")


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Turn what damaged values raise, wherever they are used, into a sentence.

    The readers name file and key of those that they check.

    Raises:
        PipelineError: the block raised what values of other types and sizes raise.
    """
    try:
        yield
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError) as e:
        if isinstance(e, PipelineError) or find_out_of_memory(e):
            raise
        cause = " ".join(str(e).split())[:200]
        raise PipelineError(
            f"{folder}: a value in its files is missing, or has another type or size "
            f"({type(e).__name__}: {cause})",
            hint=AGAIN,
        ) from e


def read_number(value: Any, where: Path | str, what: str) -> float:
    """Read a finite number from a file's value, a number or a tensor with one element.

    Args:
        value: The value.
        where: The file, for the message.
        what: Name of the value, for the message.

    Raises:
        PipelineError: it is something else, or NaN or infinite.
    """
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = math.nan
    if math.isfinite(number):
        return number
    raise PipelineError(
        f"{where}: {what} is {_format_value(value)}, no number",
        hint="it is damaged, or made by a program that is not read; use an older checkpoint, or "
        "start from the weights alone",
    )


def _format_value(value: Any) -> str:
    """Format any value on one line."""
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        return f"a tensor of shape {list(value.shape)}"
    return " ".join(reprlib.repr(value).split())


def group_values(group: Mapping[str, Any], number: int, where: Path | str) -> dict[str, Any]:
    """Read the values of a param group that are kept: numbers, and betas as a list of numbers.

    Raises:
        PipelineError: a value is not a number, or betas is not a list.
    """
    values: dict[str, Any] = {}
    for key in GROUP_VALUES:
        if key not in group:
            continue
        value, what = group[key], f"{key} of param group {number}"
        if key != "betas":
            values[key] = read_number(value, where, what)
        elif isinstance(value, list | tuple):
            values[key] = [read_number(beta, where, what) for beta in value]
        else:
            raise PipelineError(
                f"{where}: {what} is {_format_value(value)}, no list of numbers",
                hint="it is damaged, or made by a program that is not read",
            )
    return values


def check_tensors(content: Any, path: Path) -> dict[str, torch.Tensor]:
    """Check that a pickle contains a model's tensors by name."""
    if isinstance(content, dict) and all(isinstance(one, torch.Tensor) for one in content.values()):
        return content
    raise PipelineError(
        f"{path}: no file of a model's tensors; it holds {type(content).__name__}",
        hint="it may have been exchanged with another file; copy the checkpoint again",
    )


def check_optimizer(content: Any, path: Path) -> dict[str, Any]:
    """Check that a pickle is the state_dict of a torch optimizer."""
    held: dict[str, Any] = content if isinstance(content, dict) else {}
    state, groups = held.get("state"), held.get("param_groups")
    if (
        isinstance(state, dict)
        and all(isinstance(entry, dict) for entry in state.values())
        and isinstance(groups, list)
        and all(isinstance(g, dict) and isinstance(g.get("params"), list) for g in groups)
    ):
        _check_values(state, groups, path)
        return held
    holds = ", ".join(map(str, list(held)[:4])) or type(content).__name__
    raise PipelineError(
        f"{path}: no state of a torch optimizer; it holds {holds}",
        hint="it may have been exchanged with another file; copy the checkpoint again",
    )


def _check_values(
    state: Mapping[Any, dict[str, Any]], groups: Iterable[dict[str, Any]], path: Path
) -> None:
    for number, entry in state.items():
        if entry.get("step") is not None:
            read_number(entry["step"], path, f"step of parameter {number}")
        for slot in MOMENTS:
            if slot in entry and not isinstance(entry[slot], torch.Tensor):
                raise PipelineError(
                    f"{path}: {slot} of parameter {number} is no tensor but "
                    f"{type(entry[slot]).__name__}",
                    hint=AGAIN,
                )
    seen: set[int | str] = set()
    for index, group in enumerate(groups):
        group_values(group, index, path)
        for number in group["params"]:
            if not isinstance(number, int | str) or number in seen:
                raise PipelineError(
                    f"{path}: params of param group {index} holds {_format_value(number)}, which "
                    "is no number of a parameter or there twice",
                    hint=AGAIN,
                )
            seen.add(number)
        if not isinstance(group.get("param_names", []), list):
            raise PipelineError(
                f"{path}: param_names of param group {index} is "
                f"{_format_value(group['param_names'])}, no list",
                hint=AGAIN,
            )


def check_counts(
    optimizer: Path, own: int, step: int | None, counted_by: str, *, skips: bool
) -> None:
    """Check that files are of one step: the optimizer's count must equal the folder's.

    With fp16 (`skips`) updates are skipped, and the optimizer's count may be smaller.
    """
    if step is None or not own or own == step or (skips and own < step):
        return
    raise PipelineError(
        f"{optimizer}: is of step {own}, {counted_by} says {step}",
        hint="the files are of several checkpoints; copy one of them whole. If the optimizer was "
        "started later than the training, rename the folder or remove its file of the step",
    )


def check_schedule(
    optimizer: Path, own: int, schedule: Mapping[str, Any], world: int, *, once: bool
) -> None:
    """Check that a schedule is not ahead of the optimizer.

    accelerate advances it once per process, up to its `total_steps`, so it may be a multiple. There
    may be more processes than files of random states, which each machine stores locally.

    Args:
        optimizer: The optimizer's file, for the message.
        own: The optimizer's count.
        schedule: The schedule's state_dict.
        world: The number of processes with files here.
        once: Whether HF's Trainer wrote it, which advances it once per step.
    """
    counted = schedule.get("last_epoch")
    if not own or not isinstance(counted, int) or counted <= own * world:
        return
    if once or (counted % own and counted != schedule.get("total_steps")):
        raise PipelineError(
            f"{optimizer}: is of step {own}, its schedule of step {counted}",
            hint="the files are of several checkpoints; copy one of them whole",
        )
