"""The objectives of denoisers: the noise of a discrete schedule, or the velocity of flow matching.

Ho et al., "Denoising Diffusion Probabilistic Models" (2020), https://arxiv.org/abs/2006.11239.
Esser et al., "Scaling Rectified Flow Transformers for High-Resolution Image Synthesis" (2024),
https://arxiv.org/abs/2403.03206: the path of section 2, the densities and weights of section 3.1.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler

from zerotrain.config.families import LOSS
from zerotrain.errors import PipelineError
from zerotrain.models.pretrained import from_config, read_config

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


SCHEDULER = "FlowMatchEulerDiscreteScheduler"


def read_flow_scheduler(folder: Path) -> FlowMatchEulerDiscreteScheduler:
    """Read the scheduler of a base model's scheduler folder.

    Raises:
        PipelineError: it belongs to another kind of training.
    """
    path = folder / "scheduler_config.json"
    config = read_config(path)
    name = str(config.get("_class_name"))
    if name != SCHEDULER:
        raise PipelineError(
            f"{path}: {name} is not a schedule of flow matching ({SCHEDULER})",
            hint="choose a base model of this family, or change `family`",
        )
    scheduler: FlowMatchEulerDiscreteScheduler = from_config(
        FlowMatchEulerDiscreteScheduler, config
    )
    return scheduler


class FlowMatchingObjective(ABC):
    """Mean cost of the error in the velocity, noise - latents, on the straight path between them.

    The cost is the square by default.

    Args:
        scheduler: The base's scheduler, whose shift is the default.
        settings: The family's keys of config.objective; with None, every timestep is equally
            likely, unshifted and of weight 1.
        scheme: The family's own weighting_scheme.
    """

    def __init__(
        self,
        scheduler: FlowMatchEulerDiscreteScheduler,
        settings: Mapping[str, Any] | None,
        scheme: str = "none",
    ) -> None:
        given = settings or {}
        self._scheme: str = given.get("weighting_scheme") or (
            "none" if settings is None else scheme
        )
        self._mean: float = given.get("logit_mean", 0.0)
        self._std: float = given.get("logit_std", 1.0)
        self._mode_scale: float = given.get("mode_scale", 1.29)
        self._shift: float | None = 1.0 if settings is None else given.get("flow_shift")
        self._loss_function = LossFunction.read(settings)
        self._of_image: bool = given.get("precondition_outputs", False)
        self._scheduler = scheduler
        self._steps: int = scheduler.config.num_train_timesteps

    @abstractmethod
    def predict(
        self, model: torch.nn.Module, noisy: torch.Tensor, timesteps: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """Predict the velocity for noisy latents, both [B, C, h, w], at timesteps [B] in (0, T]."""

    @abstractmethod
    def image_tokens(self, latents: torch.Tensor) -> int:
        """Return the model's tokens for latents [B, C, h, w], by which some schedules shift."""

    def sigmas(self, uniform: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        """Compute the share of noise of each sample, float32 [B] in (0, 1], from numbers in [0, 1).

        It is one of the schedule's T values, which are ordered from the noisiest, as in diffusers'
        scripts (examples/dreambooth/train_dreambooth_sd3.py).
        """
        place = uniform.double()
        if self._scheme == "logit_normal":
            place = torch.sigmoid(self._mean + self._std * torch.special.ndtri(place))
        elif self._scheme == "mode":
            place = 1 - place - self._mode_scale * (torch.cos(math.pi * place / 2) ** 2 - 1 + place)
        step = (place * self._steps).long().clamp(0, self._steps - 1)
        return self._shifted(1 - step / self._steps, latents).float().to(latents.device)

    def _shifted(self, sigmas: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        config, shift = self._scheduler.config, self._shift
        if shift is None and config.use_dynamic_shifting:
            slope = (config.max_shift - config.base_shift) / (
                config.max_image_seq_len - config.base_image_seq_len
            )
            tokens = self.image_tokens(latents) - config.base_image_seq_len
            mu = config.base_shift + slope * tokens
            moved: torch.Tensor = self._scheduler.time_shift(mu, 1.0, sigmas)
            return moved
        shift = config.shift if shift is None else shift
        return shift * sigmas / (1 + (shift - 1) * sigmas)

    def weights(self, sigmas: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        """Compute the weight of each sample's loss, float32 [B].

        gaussian is from DiffSynth-Studio (diffsynth/diffusion/flow_match.py): a bell around
        sigma = 1/2, with minimum 0 and mean 1 over the schedule's shifted sigmas.
        """
        if self._scheme == "sigma_sqrt":
            return sigmas**-2.0
        if self._scheme == "cosmap":
            return 2 / (math.pi * (1 - 2 * sigmas + 2 * sigmas**2))
        if self._scheme == "gaussian":
            steps = torch.arange(self._steps, dtype=torch.float64)
            schedule = _bell(self._shifted(1 - steps / self._steps, latents))
            lowest = schedule.min()
            weights = (_bell(sigmas.cpu().double()) - lowest) / (schedule - lowest).mean()
            return weights.clamp(min=0).float().to(sigmas.device)
        return torch.ones_like(sigmas)

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Compute the loss of each sample, float32 [B], averaged over channels and pixels."""
        latents, noise = batch["latents"], batch["noise"]
        sigmas = self.sigmas(batch["uniform"], latents)
        share = sigmas.view(-1, *(1 for _ in latents.shape[1:]))
        noisy = (1 - share) * latents + share * noise
        velocity = self.predict(model, noisy, sigmas * self._steps, batch)
        error = velocity.float() - (noise - latents)
        if self._of_image:  # noisy - share * velocity is the predicted image
            error = error * share
        costs = self._loss_function.costs(error, sigmas, sigmas / (1 - sigmas))
        return masked(costs, batch).flatten(1).mean(dim=1) * self.weights(sigmas, latents)


def _bell(sigmas: torch.Tensor) -> torch.Tensor:
    return torch.exp(-2 * (sigmas - 0.5) ** 2)
