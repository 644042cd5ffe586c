"""The cost of a denoiser's error: squared, absolute, or between the two."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from zerotrain.config.families.spec import LOSS

if TYPE_CHECKING:
    from zerotrain.models.families import Batch


@dataclass(frozen=True)
class LossFunction:
    """train.loss_type with its threshold, as in kohya's sd-scripts and SimpleTuner for SDXL.

    With flow matching, SimpleTuner's `snr` threshold rises from huber_c for clean latents to 1 for
    noise, and kohya rejects `snr`; here it falls for every family.

    `huber` is 2 c (sqrt(e^2 + c^2) - c): quadratic below the threshold c, linear above;
    `smooth_l1` is `huber` / c. The threshold of a scheduled loss falls from 1 for clean latents
    to huber_c for noise: Khrapov et al., "Improving Diffusion Models's Data-Corruption Resistance
    using Scheduled Pseudo-Huber Loss" (2024), https://arxiv.org/abs/2403.16728.
    """

    loss_type: str = "l2"
    huber_c: float = 0.1
    huber_schedule: str = "snr"

    @classmethod
    def read(cls, settings: Mapping[str, Any] | None) -> LossFunction:
        """Build the loss function that the keys of config.objective select."""
        return cls(**{key: settings[key] for key in LOSS if settings and key in settings})

    def costs(
        self, error: torch.Tensor, place: torch.Tensor, noise_ratio: torch.Tensor
    ) -> torch.Tensor:
        """Compute the cost of each value of an error [B, ...], in its shape.

        Args:
            error: float32, prediction - target.
            place: float32 [B], each sample's timestep as a share of all, 1 for noise.
            noise_ratio: float32 [B], the standard deviation of its noise over that of its latents,
                infinite for noise.
        """
        if self.loss_type == "l2":
            return error.square()
        if self.loss_type == "l1":
            return error.abs()
        c = self.thresholds(place, noise_ratio).view(-1, *(1 for _ in error.shape[1:]))
        # 2 (sqrt(e^2 + c^2) - c) without the difference of nearly equal numbers.
        costs = 2 * error.square() / ((error.square() + c.square()).sqrt() + c)
        return c * costs if self.loss_type == "huber" else costs

    def thresholds(self, place: torch.Tensor, noise_ratio: torch.Tensor) -> torch.Tensor:
        """Compute c of each sample, float32 [B]."""
        if self.huber_schedule == "exponential":
            return self.huber_c**place
        if self.huber_schedule == "snr":
            return (1 - self.huber_c) / (1 + noise_ratio) ** 2 + self.huber_c
        return torch.full_like(place, self.huber_c)


def masked(costs: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Multiply costs [B, ..., h, w] by the batch's loss masks [B, 1, h, w], if it has any.

    The mean stays one over all latents, as in kohya's sd-scripts: a sample of which half is masked
    counts half.
    """
    mask = batch.get("loss_mask")
    return costs if mask is None else costs * mask
