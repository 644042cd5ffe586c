"""DeepSpeed's compiled Adam with its two moments in bf16: launch.bf16_optimizer_states.

DeepSpeed keeps moments in the dtype of the master weights, and its compiled Adam supports no other
for float32 ones. Here one piece of both moments at a time is converted to float32, stepped by it,
and rounded back.

Rounding to the nearest would freeze the second moment: with a beta2 of 0.999 an update changes it
by less than half a step of bf16's 8 bits. So it is rounded up or down at random, such that the mean
is kept (stochastic rounding: Gupta et al., https://arxiv.org/abs/1502.02551). The random numbers
come from a fixed table, read from a place that the step decides, so that a resume rounds as an
uninterrupted training does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

MOMENTS = ("exp_avg", "exp_avg_sq")
PIECE = 2**18
"""Elements converted at a time: few enough to stay in a processor's cache."""
STARTS = 2**16
"""Places from which the table of random numbers is read."""
MIX, STEP = 0x85EBCA6B, 0x9E3779B1
"""Odd multipliers of 32 bits: one of murmur3, and 2^32 over the golden ratio."""


class AdamBf16States(DeepSpeedCPUAdam):  # type: ignore[misc]
    """Adam with float32 weights and bf16 moments: 4 bytes per parameter less than DeepSpeed's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pieces = [torch.empty(PIECE) for _ in MOMENTS]
        self._dither = Dither(PIECE)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Update the parameters that have a gradient; the closure is not used."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(group, parameter)

    def _step_one(self, group: dict[str, Any], parameter: torch.nn.Parameter) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            for slot in MOMENTS:
                state[slot] = torch.zeros_like(parameter.data, dtype=torch.bfloat16)
        state["step"] += 1
        assert parameter.grad is not None
        weights, gradients = parameter.data.view(-1), parameter.grad.data.view(-1)
        stored = [state[slot].view(-1) for slot in MOMENTS]
        for start in range(0, len(weights), PIECE):
            part = slice(start, min(start + PIECE, len(weights)))
            moments = [
                piece[: part.stop - start].copy_(whole[part])
                for piece, whole in zip(self._pieces, stored, strict=True)
            ]
            self.ds_opt_adam.adam_update(
                self.opt_id, state["step"], group["lr"], *group["betas"], group["eps"],
                group["weight_decay"], group["bias_correction"], weights[part], gradients[part],
                *moments,
            )  # fmt: skip
            for number, (piece, whole) in enumerate(zip(moments, stored, strict=True)):
                place = 2 * (start // PIECE) + number
                whole[part] = self._dither.round(piece, state["step"], place)


class Dither:
    """Stochastic rounding of float32 to bf16."""

    def __init__(self, length: int) -> None:
        source = torch.Generator().manual_seed(0)
        self._noise = torch.randint(2**16, (length + STARTS,), generator=source, dtype=torch.int32)

    def round(self, values: torch.Tensor, step: int, place: int) -> torch.Tensor:
        """Round float32 values to bf16, up with the probability that keeps their mean.

        The values are changed. Another step or place draws other random numbers. bf16 is the upper
        half of a float32: a random number of 16 bits is added to the lower half, and a carry rounds
        up.
        """
        start = (step * MIX + place * STEP) % 2**32 * STARTS >> 32
        halves = values.view(torch.int32).add_(self._noise[start : start + len(values)])
        return halves.view(torch.int16)[UPPER::2].view(torch.bfloat16)


UPPER = int(sys.byteorder == "little")
"""Index of a number's upper half."""
