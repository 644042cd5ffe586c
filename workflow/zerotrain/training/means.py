"""The means of a training: of the steps since the last line of the log, and of an epoch.

Both are kept with each checkpoint, so that a training that goes on from one logs what an
undisturbed one does, to the last bit.
"""

from __future__ import annotations

import math
from typing import Any


class Means:
    """Losses and gradient norms that wait for the next line."""

    def __init__(self, samples: int, epoch_size: int) -> None:
        """Begin at `samples` of the run; an epoch has `epoch_size` of them."""
        self._epoch_size = epoch_size
        self._steps: list[tuple[float, float]] = []
        self._epoch_from = samples
        self._epoch_sum, self._epoch_steps = 0.0, 0

    def add(self, loss: float, grad_norm: float) -> None:
        """Note one step; grad_norm is infinite where the update was left out, and loss may be."""
        self._steps.append((loss, grad_norm))
        if math.isfinite(loss):
            self._epoch_sum += loss
            self._epoch_steps += 1

    def take(self) -> dict[str, Any]:
        """loss and grad_norm of the steps since they were taken before; `skipped`, if any: the
        updates that were left out. A mean to which no step adds is None."""
        losses = [loss for loss, _ in self._steps if math.isfinite(loss)]
        norms = [norm for _, norm in self._steps if math.isfinite(norm)]
        line: dict[str, Any] = {
            "loss": sum(losses) / len(losses) if losses else None,
            "grad_norm": sum(norms) / len(norms) if norms else None,
        }
        if len(norms) < len(self._steps):
            line["skipped"] = len(self._steps) - len(norms)
        self._steps = []
        return line

    def epoch_loss(self, samples: int, batch: int) -> tuple[int, float] | None:
        """Number and mean loss of the epoch that a step has ended; None of any other step.

        Args:
            samples: Samples of the run after the step.
            batch: Samples of the step. One that reaches into the next epoch belongs to the former.
        """
        ended, first = samples // self._epoch_size, (samples - batch) // self._epoch_size
        if ended == first:
            return None
        # Of an epoch of which other steps were made elsewhere, there is no mean.
        whole = self._epoch_from - first * self._epoch_size < batch
        found = (ended, self._epoch_sum / max(self._epoch_steps, 1))
        counted = self._epoch_steps
        self._epoch_from, self._epoch_sum, self._epoch_steps = samples, 0.0, 0
        return found if whole and counted else None

    def state(self) -> dict[str, Any]:
        """What `load` takes back."""
        epoch = [self._epoch_from, self._epoch_sum, self._epoch_steps]
        return {"steps": self._steps, "epoch": epoch}

    def load(self, state: dict[str, Any], *, same_phase: bool) -> None:
        """Go on from a state; a phase begins with a line of its own, amid an epoch or not."""
        self._epoch_from, self._epoch_sum, self._epoch_steps = state["epoch"]
        if same_phase:
            self._steps = [(loss, norm) for loss, norm in state["steps"]]
