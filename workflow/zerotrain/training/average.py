"""The moving average of the weights (EMA): each process averages its own part of the masters.

So no engine knows of it, ZeRO-3 gathers nothing for it, and it crosses a switch as one more slot.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from zerotrain.checkpoint import Fragment
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.position import EMA, MASTER
from zerotrain.state import ReadTensor
from zerotrain.training.engine import Engine


class WeightAverage:
    """float32, one element for each element of the master weights that this process holds."""

    def __init__(self, engine: Engine, phase: ResolvedPhase, read: ReadTensor | None) -> None:
        """Begin with what `read` gives as slot `ema`, or else with the engine's master weights."""
        self._engine = engine
        self._decay = phase.ema_decay
        self._interval = phase.ema_update_interval
        self._parts: dict[str, torch.Tensor] = {}
        for fragment in engine.masters():
            master = fragment.slots[MASTER]
            device = "cpu" if phase.ema_device == "cpu" else master.device
            part = master.detach().to(device, copy=True)
            if read is not None:
                whole = read(fragment.name, EMA).flatten()
                part.copy_(whole[fragment.start : fragment.start + part.numel()])
            self._parts[fragment.name] = part

    def update(self, step: int) -> None:
        """Take in the master weights after a global step."""
        if step % self._interval:
            return
        share = 1.0 - decay(step, self._decay)
        for fragment in self._engine.masters():
            part = self._parts[fragment.name]
            part.lerp_(fragment.slots[MASTER].detach().to(part.device), share)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """The engine computes with the average meanwhile, and then with its weights to the bit."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        for fragment in self._engine.masters():
            master, part = fragment.slots[MASTER].detach(), self._parts[fragment.name]
            held = master.clone()
            master.copy_(part)
            part.copy_(held)
        self._engine.show_masters()

    def fragments(self) -> Iterator[Fragment]:
        """The engine's fragments, each with its average."""
        for fragment in self._engine.fragments():
            slots = {**fragment.slots, EMA: self._parts[fragment.name]}
            yield Fragment(fragment.name, fragment.start, slots)


def decay(step: int, highest: float) -> float:
    """The share of the average that a step leaves, which rises from 0 to `highest`.

    That of diffusers' EMAModel without warm-up: step / (9 + step), none at the first step.
    """
    return 0.0 if step <= 1 else min(highest, step / (9 + step))
