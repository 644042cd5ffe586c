"""Engines: what steps the optimizer. The loop, the checkpoint and the state know this interface.

Either engine is filled from named full tensors and gives back named fragments, so neither's own
checkpoint format is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from zerotrain.checkpoint import Fragment
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.state import ReadTensor


class Engine(Protocol):
    """A model with its optimizer, ready to train."""

    model: torch.nn.Module
    """The denoiser as the objective calls it."""
    device: torch.device
    rank: int
    world_size: int

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of one micro batch's mean loss, divided by the accumulation."""

    def step(self, learning_rate: float) -> float:
        """Clip, update, clear the gradients; return the gradients' norm before clipping.

        Where it is not finite the weights are spoilt or the update was left out: never save them.
        """

    def load_optimizer(self, read: ReadTensor, optimizer_step: int) -> None:
        """Take master weights and moments over. The model was built from the same weights."""

    def named_trained(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """The trained parameters by name, in the order of the model."""

    def fragments(self) -> Iterator[Fragment]:
        """This rank's part of every trained parameter."""

    def optimizer_step(self) -> int:
        """Updates that the optimizer has counted."""

    def describe(self) -> dict[str, Any]:
        """What a checkpoint says of the engine that made it."""


def open_engine(model: torch.nn.Module, phase: ResolvedPhase, launch: Path) -> Engine:
    """Build the engine that the phase's launch names.

    Args:
        model: The denoiser with its starting weights, float32, on CPU.
        phase: The resolved phase.
        launch: Folder of the launch files.
    """
    if phase.gradient_checkpointing:
        model.enable_gradient_checkpointing()  # type: ignore[operator]
    model.train()
    if phase.engine == "deepspeed":
        from zerotrain.training.zero_engine import ZeroEngine

        return ZeroEngine(model, phase, launch / "deepspeed.json")
    from zerotrain.training.torch_engine import TorchEngine

    return TorchEngine(model, phase)


def adam_arguments(phase: ResolvedPhase) -> dict[str, Any]:
    """AdamW's arguments, all of them: DeepSpeed's and torch's defaults differ."""
    return {
        "lr": phase.learning_rate,
        "betas": (phase.adam_beta1, phase.adam_beta2),
        "eps": phase.adam_epsilon,
        "weight_decay": phase.adam_weight_decay,
    }


def describe_phase(phase: ResolvedPhase, world_size: int) -> dict[str, Any]:
    """The part of Engine.describe that the launch decides."""
    return {
        "preset": phase.preset,
        "engine": phase.engine,
        "zero_stage": phase.zero_stage,
        "offload_optimizer": phase.offload_optimizer,
        "mixed_precision": phase.mixed_precision,
        "world_size": world_size,
    }
