"""Engines: what steps the optimizer. The loop, the checkpoint and the state know this interface.

Either engine is filled from named full tensors and gives back named fragments, so neither's own
checkpoint format is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch

from zerotrain.checkpoint import Fragment
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.state import ReadTensor
from zerotrain.training.faster import compile_model
from zerotrain.training.gradient_checkpointing import enable_gradient_checkpointing
from zerotrain.training.param_groups import ParamGroup

STEADY = ("cpu", "cuda")
"""Devices whose tensors a second thread may copy while the first computes."""


class Engine(Protocol):
    """A model with its optimizer, ready to train."""

    model: torch.nn.Module
    """The denoiser as the objective calls it."""
    device: torch.device
    rank: int
    world_size: int
    shapes: dict[str, list[int]]
    """The trained parameters, in the order of the model."""
    groups: list[ParamGroup]
    steady: bool
    """Whether what `fragments` gives lies still until the next `step` or load, so that a thread may
    read it meanwhile."""

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of one micro batch; the step's last exchanges gradients."""

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of one micro batch's mean loss, divided by the accumulation."""

    def step(self, learning_rate: float, beta1: float | None = None) -> float:
        """Clip, update, clear the gradients; return the gradients' norm before clipping.

        `beta1` replaces the optimizer's first beta, or its momentum, for this step; None leaves it.

        Where it is not finite, the update was left out: masters, moments and their count are as
        they were, the gradients cleared; fp16 has lowered its loss scale.
        """

    def load_masters(self, read: ReadTensor) -> None:
        """Take the exact float32 weights over. The model was built from the same weights."""

    def load_moments(
        self, read: ReadTensor, optimizer_step: int, saved: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """Take the optimizer's tensors, its count, and the numbers of the saved param_groups over.

        Before its first update an optimizer has nothing that could be taken over.
        """

    def load_loss_scale(self, found: dict[str, Any]) -> None:
        """Take over what loss_scale gave, in this engine or another."""

    def masters(self) -> Iterator[Fragment]:
        """This rank's part of every trained parameter: the master weights alone."""

    def show_masters(self) -> None:
        """Compute with what `masters` hold by now: somebody has written into them.

        Not where they lie on a disk.
        """

    def fragments(self) -> Iterator[Fragment]:
        """The same, and with them `slots`."""

    def slots(self) -> list[str]:
        """The optimizer's tensors, by its own names; none before its first update."""

    def scalars(self) -> list[dict[str, float]]:
        """The optimizer's numbers of each group, apart from its count."""

    def optimizer_step(self) -> int:
        """Updates that the optimizer has made."""

    def loss_scale(self) -> dict[str, Any] | None:
        """fp16: what loss_scale.LossScale.state gives. Else None."""

    def describe(self) -> dict[str, Any]:
        """What a checkpoint says of the engine that made it."""


def open_engine(
    model: torch.nn.Module,
    phase: ResolvedPhase,
    launch: Path,
    *,
    exact: bool,
    swap: Path | None = None,
) -> Engine:
    """Build the engine that the phase's launch names.

    Args:
        model: The denoiser with its starting weights, float32, on CPU; what is not to be trained
            requires no gradient.
        phase: The resolved phase.
        launch: Folder of the launch files.
        exact: Whether the master weights must come from the model; else load_masters follows, and
            no second copy of the weights is held meanwhile.
        swap: Folder for what is swapped to a disk, instead of the one that the files name.
    """
    model.train()
    engine: Engine
    if phase.engine == "deepspeed":
        from zerotrain.training.zero_engine import ZeroEngine

        engine = ZeroEngine(model, phase, launch / "deepspeed.json", exact=exact, swap=swap)
    else:
        from zerotrain.training.torch_engine import TorchEngine

        engine = TorchEngine(model, phase)
    enable_gradient_checkpointing(model, phase)
    compile_model(model, phase)
    return engine


def describe_phase(phase: ResolvedPhase, world_size: int) -> dict[str, Any]:
    """The part of Engine.describe that the launch decides."""
    return {
        "preset": phase.preset,
        "engine": phase.engine,
        "zero_stage": phase.zero_stage,
        "offload_optimizer": phase.offload_optimizer,
        "offload_param": phase.offload_param,
        "world_size": world_size,
        "mixed_precision": phase.mixed_precision,
        "global_batch_size": phase.global_batch_size,
        "gradient_accumulation_steps": phase.gradient_accumulation_steps,
    }
