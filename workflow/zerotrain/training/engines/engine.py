"""The interface of the engines, which step the optimizer, for the loop, checkpoints and states.

An engine loads parts of named tensors and returns named fragments, so its own checkpoint format is
not needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from zerotrain.config.launch import Fp16Config
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.state.checkpoint import Fragment
from zerotrain.state.state import FillPart
from zerotrain.training.optim.optimizer import ParamGroup

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


FACTOR = 2.0


class LossScale:
    """The scale of the losses, and the counters that decide when it changes.

    fp16's loss scale by DeepSpeed's rule, for the torch engine; its state passes between all
    engines. An overflow uses up one of `hysteresis`, and halves the scale if only one is left.
    After every `loss_scale_window` updates without one, the next good update restores the
    hysteresis and doubles the scale. (The rule of DeepSpeed's runtime/fp16/loss_scaler.py; a test
    compares the two.)
    """

    def __init__(self, settings: Fp16Config) -> None:
        """Start as `fp16` of the resolved phase says; a loss_scale other than 0 never changes."""
        self._settings = settings
        self.dynamic = settings.loss_scale == 0
        power = settings.initial_scale_power
        self.scale = float(2**power if self.dynamic else settings.loss_scale)
        self._good_steps, self._hysteresis = 0, int(settings.hysteresis)

    def update(self, overflow: bool) -> None:
        """Set the scale of the next step by whether the gradients of this one overflowed."""
        if not self.dynamic:
            return
        window, hysteresis = self._settings.loss_scale_window, self._settings.hysteresis
        if overflow:
            if self._hysteresis == 1:
                self.scale = max(self.scale / FACTOR, float(self._settings.min_loss_scale))
            else:
                self._hysteresis -= 1
            self._good_steps = 0
        elif self._good_steps == window:
            self.scale *= FACTOR
            self._good_steps, self._hysteresis = 1, hysteresis
        else:
            self._good_steps += 1

    def state(self) -> dict[str, Any]:
        """Return the scale, the good steps since its last change or overflow, and hysteresis."""
        return {
            "scale": self.scale,
            "good_steps": self._good_steps,
            "hysteresis": self._hysteresis,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Load what `state` returned, in this engine or another; a fixed scale stays."""
        if self.dynamic:
            state = clamp_state(state, self._settings)
            self.scale, self._good_steps = state["scale"], state["good_steps"]
            self._hysteresis = state["hysteresis"]


def clamp_state(state: Mapping[str, Any], settings: Fp16Config) -> dict[str, Any]:
    """Return a loss scale's state within other settings: a due change comes at the next step."""
    hysteresis = settings.hysteresis
    return {
        "scale": float(state["scale"]),
        "good_steps": min(int(state["good_steps"]), settings.loss_scale_window),
        "hysteresis": min(int(state.get("hysteresis", hysteresis)), hysteresis),
    }


def is_at_minimum(state: Mapping[str, Any], settings: Fp16Config) -> bool:
    """Return whether an overflow can no longer lower the scale: it is fixed, or at its lowest.

    Then the training has diverged, or the fixed scale is too high.
    """
    lowest = bool(state["scale"] <= settings.min_loss_scale)
    return bool(settings.loss_scale) or (lowest and state["hysteresis"] == 1)
