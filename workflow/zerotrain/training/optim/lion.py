"""Lion, which torch lacks: plain elementwise tensor operations on any device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """Optimizer that steps by the sign of a momentum, interpolated twice.

    Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023),
    https://arxiv.org/abs/2302.06675, algorithm 2:
        c = beta1 m + (1 - beta1) g;  w = w - lr (sign(c) + weight_decay w);
        m = beta2 m + (1 - beta2) g.

    Args:
        params: Parameters, or groups of them with separate values.
        lr: Learning rate.
        betas: Interpolation factors of the step and of the momentum, each in [0, 1).
        weight_decay: Decoupled weight decay.

    Raises:
        ValueError: a value outside its range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        if lr < 0 or weight_decay < 0:
            raise ValueError(f"lr {lr} and weight_decay {weight_decay} must not be negative")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas {betas} must be in [0, 1)")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = closure() if closure else None
        for group in self.param_groups:
            rate, (beta1, beta2) = group["lr"], group["betas"]
            for weights in group["params"]:
                if weights.grad is None:
                    continue
                state = self.state[weights]
                if not state:
                    state["exp_avg"] = torch.zeros_like(weights)
                momentum = state["exp_avg"]
                weights.mul_(1 - rate * group["weight_decay"])
                weights.add_(momentum.lerp(weights.grad, 1 - beta1).sign_(), alpha=-rate)
                momentum.lerp_(weights.grad, 1 - beta2)
        return loss
