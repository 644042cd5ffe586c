"""Communication between the processes of one training; a single process skips it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import distributed

T = TypeVar("T")


def broadcast(value: T) -> T:
    """Return the first process's value in every process; it must be picklable."""
    if not distributed.is_initialized():
        return value
    box = [value]
    distributed.broadcast_object_list(box, src=0)
    return box[0]


def gather(value: T) -> list[T]:
    """Return every process's value, by rank, in every process; it must be picklable."""
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return [value]
    values: list[T | None] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values  # type: ignore[return-value]


def reduce_loss_and_flags(
    loss: float, flags: Sequence[bool], device: torch.device
) -> tuple[float, list[bool]]:
    """Return the mean of the processes' losses, and for each flag whether any process raised it."""
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return loss, list(flags)
    both = torch.tensor([loss, *map(float, flags)], dtype=torch.float64, device=device)
    distributed.all_reduce(both)
    total, *raised = both.tolist()
    return total / distributed.get_world_size(), [count > 0 for count in raised]
