"""The means that a training logs: over the steps since the last log line, and over an epoch.

Both are saved with each checkpoint, so that a resumed training logs the same bits as an
uninterrupted one.
"""

from __future__ import annotations

import math
from typing import Any


class Means:
    """Losses and gradient norms collected for the next log line."""

    def __init__(self, samples: int, epoch_size: int) -> None:
        """Start at sample `samples` of the run; an epoch has `epoch_size` samples."""
        self._epoch_size = epoch_size
        self._steps: list[tuple[float, float]] = []
        self._epoch_from = samples
        self._epoch_sum, self._epoch_steps = 0.0, 0

    def add(self, loss: float, grad_norm: float) -> None:
        """Add one step; grad_norm is infinite if the update was skipped, and loss may be."""
        self._steps.append((loss, grad_norm))
        if math.isfinite(loss):
            self._epoch_sum += loss
            self._epoch_steps += 1

    def take(self) -> dict[str, Any]:
        """Return the mean loss and grad_norm of the steps since the last call.

        `skipped` counts the skipped updates, if any. A mean over no step is None.
        """
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
        """Return number and mean loss of the epoch that a step ended; None if it ended none.

        Args:
            samples: Samples of the run after the step.
            batch: Samples of the step. A step across two epochs belongs to the first.
        """
        ended, first = samples // self._epoch_size, (samples - batch) // self._epoch_size
        if ended == first:
            return None
        # An epoch has no mean if its first steps were not added here.
        whole = self._epoch_from - first * self._epoch_size < batch
        epoch = (ended, self._epoch_sum / max(self._epoch_steps, 1))
        counted = self._epoch_steps
        self._epoch_from, self._epoch_sum, self._epoch_steps = samples, 0.0, 0
        return epoch if whole and counted else None

    def state(self) -> dict[str, Any]:
        """Return what `load` restores."""
        epoch = [self._epoch_from, self._epoch_sum, self._epoch_steps]
        return {"steps": self._steps, "epoch": epoch}

    def load(self, state: dict[str, Any], *, same_phase: bool) -> None:
        """Continue from a state; a new phase starts a new log line, but continues the epoch."""
        self._epoch_from, self._epoch_sum, self._epoch_steps = state["epoch"]
        if same_phase:
            self._steps = [(loss, norm) for loss, norm in state["steps"]]
