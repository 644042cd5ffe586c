"""The interface of the engines, which step the optimizer, for the loop, checkpoints and states.

An engine loads parts of named tensors and returns named fragments, so its own checkpoint format is
not needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.state.checkpoint import Fragment
from zerotrain.state.state import FillPart
from zerotrain.training.optim.param_groups import ParamGroup

STEADY = ("cpu", "cuda")
"""Devices whose tensors a second thread may copy while the first computes."""


class Engine(Protocol):
    """A model with its optimizer, ready to train."""

    model: torch.nn.Module
    """The model as the objective calls it."""
    device: torch.device
    rank: int
    world_size: int
    shapes: dict[str, list[int]]
    """Shapes of the trained parameters, in the order of the model."""
    groups: list[ParamGroup]
    steady: bool
    """Whether the tensors of `fragments` stay unchanged until the next `step` or load, so that a
    thread may read them meanwhile."""

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        """Return a context for one micro batch's passes; a step's last exchanges gradients."""

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of one micro batch's mean loss, divided by the accumulation steps."""

    def step(self, learning_rate: float, beta1: float | None = None) -> float:
        """Clip, update, clear the gradients; return the gradients' norm before clipping.

        `beta1` replaces the optimizer's first beta, or its momentum, for this step; None keeps it.

        If the norm is not finite, the update is skipped: masters, moments and their count stay the
        same, and the gradients are cleared; fp16's loss scale counts an overflow.
        """

    def load_masters(self, fill: FillPart) -> None:
        """Load the exact float32 weights and compute with them, whatever the model was built from.

        A model that is swapped to a disk must be built from the same weights.
        """

    def load_moments(
        self, fill: FillPart, optimizer_step: int, saved: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """Load the optimizer's tensors and step count, and the scalars of the saved param_groups.

        Before its first update an optimizer has nothing to load.
        """

    def load_loss_scale(self, state: dict[str, Any]) -> None:
        """Load what `loss_scale` returned, in this engine or another."""

    def masters(self) -> Iterator[Fragment]:
        """Yield this rank's part of every trained parameter: only the master weights."""

    def show_masters(self) -> None:
        """Compute with the present content of `masters`, after a change to it.

        Not for masters on a disk.
        """

    def fragments(self) -> Iterator[Fragment]:
        """Yield the same parts with their `slots`."""

    def slots(self) -> list[str]:
        """Return the names of the optimizer's tensors; none before its first update."""

    def scalars(self) -> list[dict[str, float]]:
        """Return the optimizer's scalars of each group, except for the step count."""

    def optimizer_step(self) -> int:
        """Return how many updates the optimizer has made."""

    def loss_scale(self) -> dict[str, Any] | None:
        """Return loss_scale.LossScale.state under fp16, else None."""

    def describe(self) -> dict[str, Any]:
        """Return what a checkpoint records of the engine that made it."""


def describe_phase(phase: ResolvedPhase, world_size: int) -> dict[str, Any]:
    """Return the part of Engine.describe that the launch decides."""
    return {
        "preset": phase.launch.preset,
        "engine": phase.derived.engine,
        "zero_stage": phase.derived.zero_stage,
        "offload_optimizer": phase.derived.offload_optimizer,
        "offload_param": phase.derived.offload_param,
        "world_size": world_size,
        "mixed_precision": phase.launch.mixed_precision,
        "global_batch_size": phase.train.global_batch_size,
        "gradient_accumulation_steps": phase.train.gradient_accumulation_steps,
    }
