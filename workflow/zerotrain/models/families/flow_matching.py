"""The flow matching objective: the model predicts the velocity from an image to noise.

Esser et al., "Scaling Rectified Flow Transformers for High-Resolution Image Synthesis" (2024),
https://arxiv.org/abs/2403.03206: the path of section 2, the densities and weights of section 3.1.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from zerotrain.errors import PipelineError
from zerotrain.models.families.loss_functions import LossFunction, masked
from zerotrain.models.pretrained import from_config, read_config

if TYPE_CHECKING:
    from zerotrain.models.families import Batch

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
