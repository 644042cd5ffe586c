"""Prodigy, which torch lacks: its step size comes from an estimated distance to the solution."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

SCALARS = ("d", "d_numerator")
"""Scalars that all groups share, kept with every parameter."""


class Prodigy(torch.optim.Optimizer):
    """Adam with a step size of lr times an estimate d of the distance from start to solution.

    Mishchenko and Defazio, "Prodigy: An Expeditiously Adaptive Parameter-Free Learner" (2023),
    https://arxiv.org/abs/2306.06101, algorithm 4. Arguments are those of the authors' package.

    Args:
        params: Parameters, or groups of them with separate values.
        lr: Factor of the estimate; 1 is intended.
        betas: Adam's betas.
        beta3: Decay of the estimate's two sums; 0: the square root of the second beta.
        eps: Keeps the divisor from zero, scaled by d.
        weight_decay: Decoupled, or with `decouple` off added to the gradient.
        decouple: Whether weight decay is decoupled, as in AdamW.
        use_bias_correction: Whether the step is bias-corrected, as in Adam.
        safeguard_warmup: Whether lr is excluded from the estimate's divisor.
        d0: First estimate.
        d_coef: Factor of each later estimate.

    Raises:
        ValueError: a value outside its range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.999),
        beta3: float = 0.0,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decouple: bool = True,
        use_bias_correction: bool = False,
        safeguard_warmup: bool = False,
        d0: float = 1e-6,
        d_coef: float = 1.0,
    ) -> None:
        if not (d0 > 0 and eps > 0 and d_coef > 0):
            raise ValueError(f"d0 {d0}, eps {eps} and d_coef {d_coef} must be above 0")
        if not all(0 <= beta < 1 for beta in (*betas, beta3)):
            raise ValueError(f"betas {betas} and beta3 {beta3} must be in [0, 1)")
        values = {
            "lr": lr, "betas": betas, "beta3": beta3, "eps": eps, "weight_decay": weight_decay,
            "decouple": decouple, "use_bias_correction": use_bias_correction,
            "safeguard_warmup": safeguard_warmup, "d0": d0, "d_coef": d_coef,
        }  # fmt: skip
        super().__init__(params, values)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = closure() if closure else None
        held = [
            (group, weights, self._state_of(weights, group))
            for group in self.param_groups
            for weights in group["params"]
            if weights.grad is not None
        ]
        if not held:
            return loss
        first, _, known = held[0]
        d, numerator = (float(known[name]) for name in SCALARS)
        step = int(known["step"])
        rate = d * max(group["lr"] for group in self.param_groups)
        if first["use_bias_correction"]:
            beta1, beta2 = first["betas"]
            rate *= math.sqrt(1 - beta2 ** (step + 1)) / (1 - beta1 ** (step + 1))
        numerator *= _beta3(first)
        divisor = 0.0
        for group, weights, state in held:
            if group["weight_decay"] and not group["decouple"]:
                weights.grad.add_(weights, alpha=group["weight_decay"])
            if group["lr"] > 0:
                added, summed = _accumulate(group, weights, state, d, rate)
                numerator, divisor = numerator + added, divisor + summed
        if divisor == 0:
            return loss
        d_next = max(d, first["d_coef"] * numerator / divisor) if rate > 0 else d
        for group, weights, state in held:
            decay = group["weight_decay"] if group["decouple"] else 0.0
            divided = state["exp_avg_sq"].sqrt().add_(d_next * group["eps"])
            weights.mul_(1 - decay * rate)
            weights.addcdiv_(state["exp_avg"], divided, value=-rate)
            for name, value in zip(SCALARS, (d_next, numerator), strict=True):
                state[name].fill_(value)
            state["step"] += 1
        return loss

    def _state_of(self, weights: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state: dict[str, Any] = self.state[weights]
        if not state:
            for name, value in (("step", 0.0), ("d", group["d0"]), ("d_numerator", 0.0)):
                state[name] = torch.tensor(value, dtype=torch.float64)
            state["p0"] = weights.detach().clone()
            for name in ("s", "exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(weights)
        return state


def _beta3(group: dict[str, Any]) -> float:
    return float(group["beta3"] or math.sqrt(group["betas"][1]))


def _accumulate(
    group: dict[str, Any], weights: torch.Tensor, state: dict[str, Any], d: float, rate: float
) -> tuple[float, float]:
    """Add a gradient to the averages; return its terms of the estimate's two sums."""
    gradient, (beta1, beta2), d0 = weights.grad, group["betas"], group["d0"]
    assert gradient is not None
    along = torch.dot(gradient.flatten(), (state["p0"] - weights).flatten())
    state["exp_avg"].mul_(beta1).add_(gradient, alpha=d * (1 - beta1))
    state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=d * d * (1 - beta2))
    share = (d / d0) * (d if group["safeguard_warmup"] else rate)
    state["s"].mul_(_beta3(group)).add_(gradient, alpha=share)
    return (d / d0) * rate * float(along), float(state["s"].abs().sum())
