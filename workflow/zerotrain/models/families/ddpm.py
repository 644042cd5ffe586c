"""The denoising objective of models trained on a discrete (DDPM) noise schedule.

Ho et al., "Denoising Diffusion Probabilistic Models" (2020), https://arxiv.org/abs/2006.11239.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from diffusers import DDPMScheduler

from zerotrain.errors import PipelineError
from zerotrain.models.families.loss_functions import LossFunction, masked
from zerotrain.models.pretrained import from_config, read_config

if TYPE_CHECKING:
    from zerotrain.models.families import Batch

PREDICTION_TYPES = ("epsilon", "v_prediction")


@dataclass(frozen=True)
class NoiseSchedule:
    """The signal that remains at each timestep, and the quantity that the denoiser predicts.

    Attributes:
        alphas_cumprod: float32 [T], the share of signal variance.
        prediction_type: `epsilon` or `v_prediction`.
    """

    alphas_cumprod: torch.Tensor
    prediction_type: str

    @property
    def snr(self) -> torch.Tensor:
        """Signal-to-noise ratio alpha^2 / sigma^2 of each timestep, float32 [T]."""
        return self.alphas_cumprod / (1 - self.alphas_cumprod)


def read_noise_schedule(folder: Path) -> NoiseSchedule:
    """Read the schedule from a base model's scheduler folder, whichever sampler it names.

    Raises:
        PipelineError: the scheduler belongs to another kind of training (EDM, flow matching).
    """
    path = folder / "scheduler_config.json"
    config = read_config(path)
    name = str(config.get("_class_name"))
    prediction_type = str(config.get("prediction_type", "epsilon"))
    if name.startswith(("EDM", "Flow")) or prediction_type not in PREDICTION_TYPES:
        raise PipelineError(
            f"{path}: {name} with prediction_type {prediction_type!r} is not a discrete noise "
            f"schedule with {' or '.join(PREDICTION_TYPES)}",
            hint="choose a base model of this family that was trained on a discrete schedule",
        )
    scheduler = from_config(DDPMScheduler, config)
    return NoiseSchedule(scheduler.alphas_cumprod.float(), prediction_type)


class DenoisingObjective(ABC):
    """Mean cost of the error in the predicted noise, or in the velocity v.

    The cost is the square by default.

    v = alpha * noise - sigma * latents: Salimans and Ho, "Progressive Distillation for Fast
    Sampling of Diffusion Models" (2022), https://arxiv.org/abs/2202.00512.
    """

    def __init__(
        self,
        schedule: NoiseSchedule,
        snr_gamma: float | None = None,
        loss_function: LossFunction | None = None,
    ) -> None:
        self.schedule = schedule
        self.snr_gamma = snr_gamma
        self.loss_function = loss_function or LossFunction()

    @abstractmethod
    def predict(
        self,
        model: torch.nn.Module,
        noisy: torch.Tensor,
        timesteps: torch.Tensor,
        batch: Batch,
    ) -> torch.Tensor:
        """Compute the denoiser's output for noisy latents, both [B, C, h, w], at timesteps [B]."""

    def timesteps(self, uniform: torch.Tensor) -> torch.Tensor:
        """Map uniform numbers [B] in [0, 1) to timesteps int64 [B], each equally likely."""
        return (uniform * len(self.schedule.alphas_cumprod)).long()

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Compute the loss of each sample, float32 [B], averaged over channels and pixels."""
        latents, noise = batch["latents"], batch["noise"]
        timesteps = self.timesteps(batch["uniform"]).to(latents.device)
        alphas_cumprod = self.schedule.alphas_cumprod.to(latents.device)[timesteps]
        alpha = alphas_cumprod.sqrt().view(-1, 1, 1, 1)
        sigma = (1 - alphas_cumprod).sqrt().view(-1, 1, 1, 1)
        noisy = alpha * latents + sigma * noise
        target = noise
        if self.schedule.prediction_type == "v_prediction":
            target = alpha * noise - sigma * latents
        prediction = self.predict(model, noisy, timesteps, batch)
        place = timesteps / len(self.schedule.alphas_cumprod)
        error = prediction.float() - target
        costs = self.loss_function.costs(error, place, (sigma / alpha).flatten())
        loss = masked(costs, batch).mean(dim=(1, 2, 3))
        if self.snr_gamma is not None:
            loss = loss * self.min_snr_weight(timesteps, self.snr_gamma)
        return loss

    def min_snr_weight(self, timesteps: torch.Tensor, gamma: float) -> torch.Tensor:
        """Compute weights float32 [B]: min(SNR, gamma) in terms of the predicted quantity.

        The squared error in epsilon is SNR times that in x0, hence the division by SNR; in v it is
        SNR + 1 times. Hang et al., "Efficient Diffusion Training via Min-SNR Weighting Strategy"
        (2023), https://arxiv.org/abs/2303.09556, section 3.4 and appendix.
        """
        snr = self.schedule.snr.to(timesteps.device)[timesteps]
        if self.schedule.prediction_type == "v_prediction":
            return snr.clamp(max=gamma) / (snr + 1)
        # min(SNR, gamma) / SNR, also where a schedule with zero terminal SNR has no signal.
        return (gamma / snr).clamp(max=1)
