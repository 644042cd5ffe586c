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
        """Note one step; grad_norm is infinite where fp16 left the update out."""
        self._steps.append((loss, grad_norm))
        self._epoch_sum += loss
        self._epoch_steps += 1

    def take(self) -> dict[str, Any]:
        """loss and grad_norm of the steps since they were taken before, and `skipped` of fp16."""
        losses, norms = zip(*self._steps, strict=True)
        self._steps = []
        taken = [norm for norm in norms if math.isfinite(norm)]
        line: dict[str, Any] = {
            "loss": sum(losses) / len(losses),
            "grad_norm": sum(taken) / len(taken) if taken else None,
        }
        if len(taken) < len(norms):
            line["skipped"] = len(norms) - len(taken)
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
        found = (ended, self._epoch_sum / self._epoch_steps)
        self._epoch_from, self._epoch_sum, self._epoch_steps = samples, 0.0, 0
        return found if whole and math.isfinite(found[1]) else None

    def state(self) -> dict[str, Any]:
        """What `load` takes back."""
        epoch = [self._epoch_from, self._epoch_sum, self._epoch_steps]
        return {"steps": self._steps, "epoch": epoch}

    def load(self, state: dict[str, Any], *, same_phase: bool) -> None:
        """Go on from a state; a phase begins with a line of its own, amid an epoch or not."""
        self._epoch_from, self._epoch_sum, self._epoch_steps = state["epoch"]
        if same_phase:
            self._steps = [(loss, norm) for loss, norm in state["steps"]]
