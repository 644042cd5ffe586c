"""A loss or a gradient that is not a finite number: whose it is, and what follows.

Every engine leaves an update out whose gradients have no finite norm, as fp16's loss scale wants
it; so a loss that is not finite has only to give such gradients.
"""

from __future__ import annotations

import torch

from zerotrain.errors import PipelineError
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.training import ranks
from zerotrain.training.batches import Batches
from zerotrain.training.log import Log

MOST_IN_A_ROW = 10
"""More updates left out one after the other are no bad samples: the training has diverged."""
NAMED = 8
"""Samples that a sentence names."""
HINT = (
    "look at these samples; lower learning_rate, or a fixed fp16.loss_scale, or set max_grad_norm; "
    "nan_action: skip leaves such an update out; training goes on from the newest checkpoint "
    "before it"
)

Losses = list[tuple[int, torch.Tensor]]
"""Of each micro batch of a step: the number of its first sample, and the losses of all [B]."""


def poisoned(loss: torch.Tensor) -> torch.Tensor:
    """The loss, bit for bit; but every gradient of one that is not finite is NaN.

    One process's NaN is then all processes' when the gradients have been exchanged: they agree
    without a word. A loss of inf may have finite gradients otherwise, and none for some weights.
    """
    return loss * (1 + 0 * loss.detach())


class LeftOut:
    """The updates of a phase that are left out for such a number, and the last one's reason."""

    def __init__(self, phase: ResolvedPhase, batches: Batches, log: Log) -> None:
        self._phase, self._batches, self._log = phase, batches, log
        self._in_a_row = 0

    def good(self) -> None:
        """Note an update that was made."""
        self._in_a_row = 0

    def refuse_or_note(self, what: str, value: float, step: int, losses: Losses) -> None:
        """Say which samples it was; every process calls this at the same step.

        Args:
            what: What is no finite number.
            value: That number.
            step: The step, counted from 1.
            losses: This process's, of the step.

        Raises:
            PipelineError: nan_action is stop, or too many updates were left out in a row.
        """
        text = f"phase {self._phase.phase}: the {what} of step {step} is {value}"
        text += f"; {self._named(losses)}"
        if self._phase.nan_action == "stop":
            raise PipelineError(text, hint=HINT)
        self._in_a_row += 1
        if self._in_a_row > MOST_IN_A_ROW:
            raise PipelineError(
                f"{text}; the {MOST_IN_A_ROW} updates before it were left out, too",
                hint="the training has diverged: lower learning_rate, or a fixed fp16.loss_scale, "
                "or set max_grad_norm, and go on from a checkpoint before it",
            )
        self._log.say(f"{text}; this update is left out (nan_action: skip)")

    def _named(self, losses: Losses) -> str:
        """The samples whose own losses are not finite; all of the step where each is."""
        own = [
            (first + i, finite)
            for first, part in losses
            for i, finite in enumerate(torch.isfinite(part).tolist())
        ]
        every = sorted(pair for held in ranks.gather(own) for pair in held)
        spoilt = [position for position, finite in every if not finite]
        which = spoilt or [position for position, _ in every]
        names = list(dict.fromkeys(self._batches.name(position) for position in which))
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        found = f"{', '.join(names[:NAMED])}{more}"
        return f"the loss is not finite for {found}" if spoilt else f"its samples: {found}"
