"""Whether the files of a checkpoint without DeepSpeed are what their names say, and of one step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from zerotrain.errors import PipelineError

AGAIN = "copy the checkpoint again, or use an older one"
STEP_FILES = ("trainer_state.json", "training_state.json")
"""Where HF's Trainer and SimpleTuner note `global_step`."""


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file of a checkpoint.

    Raises:
        PipelineError: it is truncated or not JSON.
    """
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise PipelineError(f"{path}: truncated or not JSON ({error})", hint=AGAIN) from error
    return found if isinstance(found, dict) else {}


def check_tensors(found: Any, path: Path) -> dict[str, torch.Tensor]:
    """Refuse a pickle that is not a model's tensors by name."""
    if isinstance(found, dict) and all(isinstance(one, torch.Tensor) for one in found.values()):
        return found
    raise PipelineError(
        f"{path}: no file of a model's tensors; it holds {type(found).__name__}",
        hint="it may have been exchanged with another file; copy the checkpoint again",
    )


def check_optimizer(found: Any, path: Path) -> dict[str, Any]:
    """Refuse a pickle that is not the state_dict of a torch optimizer."""
    held: dict[str, Any] = found if isinstance(found, dict) else {}
    state, groups = held.get("state"), held.get("param_groups")
    if (
        isinstance(state, dict)
        and all(isinstance(entry, dict) for entry in state.values())
        and isinstance(groups, list)
        and all(isinstance(g, dict) and isinstance(g.get("params"), list) for g in groups)
    ):
        return held
    holds = ", ".join(map(str, list(held)[:4])) or type(found).__name__
    raise PipelineError(
        f"{path}: no state of a torch optimizer; it holds {holds}",
        hint="it may have been exchanged with another file; copy the checkpoint again",
    )


def check_counts(
    optimizer: Path, own: int, step: int | None, counted_by: str, *, skips: bool
) -> None:
    """Refuse files of several steps: the optimizer's count is another than the folder's.

    Under fp16 (`skips`) updates are left out, and the optimizer's count may be smaller.
    """
    if step is None or not own or own == step or (skips and own < step):
        return
    raise PipelineError(
        f"{optimizer}: is of step {own}, {counted_by} says {step}",
        hint="the files are of several checkpoints; copy one of them whole. If the optimizer was "
        f"started later than the training, rename the folder or remove {STEP_FILES[1]}",
    )


def check_schedule(optimizer: Path, own: int, schedule: Any, world: int) -> None:
    """Refuse a schedule that is ahead of the optimizer: accelerate counts it once a process."""
    counted = schedule.get("last_epoch") if isinstance(schedule, dict) else None
    if own and isinstance(counted, int) and counted > own * world:
        raise PipelineError(
            f"{optimizer}: is of step {own}, its schedule of step {counted}",
            hint="the files are of several checkpoints; copy one of them whole",
        )
