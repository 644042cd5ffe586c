"""Losses and gradients that are not finite: the samples that cause them, and what follows.

Every engine skips an update if the norm of its gradients is not finite, as fp16's loss scale
requires; so a loss that is not finite only has to produce such gradients.
"""

from __future__ import annotations

import torch

from zerotrain.config.suggestions import join_first
from zerotrain.errors import PipelineError
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.training import ranks
from zerotrain.training.batches import ReadAhead
from zerotrain.training.reporting.log import Log

MOST_IN_A_ROW = 10
"""More skipped updates in a row are not due to bad samples: the training has diverged."""
NAMED = 8
"""Most samples that a message names."""
HINT = (
    "look at these samples; lower learning_rate, or a fixed fp16.loss_scale, or set max_grad_norm; "
    "nan_action: skip leaves such an update out; training continues from the newest checkpoint "
    "before it"
)

Losses = list[tuple[int, torch.Tensor]]
"""For each micro batch of a step: the number of its first sample, and its samples' losses [B]."""


def nan_gradients_if_not_finite(loss: torch.Tensor) -> torch.Tensor:
    """Return the loss, bit for bit, but with NaN in every gradient if it is not finite.

    The exchange of gradients then spreads one process's NaN to all, so that they agree without
    further communication. Otherwise a loss of inf may have finite gradients, or none for some
    weights.
    """
    return loss * (1 + 0 * loss.detach())


class SkippedSteps:
    """A phase's handling of skipped updates: it reports them and counts those in a row."""

    def __init__(self, phase: ResolvedPhase, batches: ReadAhead, log: Log) -> None:
        self._phase, self._batches, self._log = phase, batches, log
        self._in_a_row = 0

    def reset(self) -> None:
        """Restart the count after an update that was made."""
        self._in_a_row = 0

    def check_and_report(self, what: str, value: float, step: int, losses: Losses) -> None:
        """Report the samples at fault; every process calls this at the same step.

        Args:
            what: The quantity that is not finite.
            value: Its value.
            step: The step, counted from 1.
            losses: This process's losses of the step.

        Raises:
            PipelineError: nan_action is stop, or too many updates were skipped in a row.
        """
        text = f"phase {self._phase.phase}: the {what} of step {step} is {value}"
        text += f"; {self._name_samples(losses)}"
        if self._phase.train.nan_action == "stop":
            raise PipelineError(text, hint=HINT)
        self._in_a_row += 1
        if self._in_a_row > MOST_IN_A_ROW:
            raise PipelineError(
                f"{text}; the {MOST_IN_A_ROW} updates before it were left out, too",
                hint="the training has diverged: lower learning_rate, or a fixed fp16.loss_scale, "
                "or set max_grad_norm, and continue from a checkpoint before it",
            )
        self._log.say(f"{text}; this update is left out (nan_action: skip)")

    def _name_samples(self, losses: Losses) -> str:
        """Name the samples with losses that are not finite, or all of the step if none is such."""
        own = [
            (first + i, finite)
            for first, part in losses
            for i, finite in enumerate(torch.isfinite(part).tolist())
        ]
        every = sorted(pair for held in ranks.gather(own) for pair in held)
        spoilt = [position for position, finite in every if not finite]
        which = spoilt or [position for position, _ in every]
        names = list(dict.fromkeys(self._batches.name(position) for position in which))
        listed = join_first(names, NAMED)
        return f"the loss is not finite for {listed}" if spoilt else f"its samples: {listed}"
