"""The exponential moving average of the weights (EMA), over each process's part of the masters.

So no engine handles it, ZeRO-3 gathers nothing for it, and it passes a switch as one more slot.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.state.checkpoint import Fragment
from zerotrain.state.position import EMA_SLOT, MASTER
from zerotrain.state.state import FillPart
from zerotrain.training.engines.engine import Engine


class EMA:
    """float32 averages, one for each element of the master weights that this process holds."""

    def __init__(self, engine: Engine, phase: ResolvedPhase, fill: FillPart | None) -> None:
        """Start from slot `ema` of `fill`, or else from the engine's master weights."""
        self._engine = engine
        self._decay = phase.train.ema_decay
        self._interval = phase.train.ema_update_interval
        self._parts: dict[str, torch.Tensor] = {}
        for fragment in engine.masters():
            master = fragment.slots[MASTER]
            device = "cpu" if phase.train.ema_device == "cpu" else master.device
            part = master.detach().to(device, copy=True)
            if fill is not None:
                fill(fragment.name, EMA_SLOT, fragment.start, part)
            self._parts[fragment.name] = part

    def update(self, step: int) -> None:
        """Update the average with the master weights after a global step."""
        if step % self._interval:
            return
        share = 1.0 - decay(step, self._decay)
        for fragment in self._engine.masters():
            part = self._parts[fragment.name]
            part.lerp_(fragment.slots[MASTER].detach().to(part.device), share)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let the engine compute with the average; restore its weights to the bit afterwards."""
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
        """Yield the engine's fragments, each with its average."""
        for fragment in self._engine.fragments():
            slots = {**fragment.slots, EMA_SLOT: self._parts[fragment.name]}
            yield Fragment(fragment.name, fragment.start, slots)


def decay(step: int, highest: float) -> float:
    """Return the share of the average that a step keeps; it rises from 0 to `highest`.

    The formula of diffusers' EMAModel without warm-up: step / (9 + step), 0 at the first step.
    """
    return 0.0 if step <= 1 else min(highest, step / (9 + step))
