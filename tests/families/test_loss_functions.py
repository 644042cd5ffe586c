"""The cost of an error against kohya's and SimpleTuner's formulas, and in every image family."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler

from zerotrain.config.families import FAMILIES
from zerotrain.config.training import TrainConfig
from zerotrain.models.families.objectives import (
    DenoisingObjective,
    FlowMatchingObjective,
    LossFunction,
    NoiseSchedule,
)

C = 0.2
IMAGES = [name for name, kind in FAMILIES.items() if kind.modality == "image"]


class Denoising(DenoisingObjective):
    """Its model predicts zeros."""

    def predict(self, model, noisy, timesteps, batch):
        return torch.zeros_like(noisy)


class Flow(FlowMatchingObjective):
    """Its model predicts zeros."""

    def predict(self, model, noisy, timesteps, batch):
        return torch.zeros_like(noisy)

    def image_tokens(self, latents):
        return 1


def costs(error: float, place: float, noise_ratio: float, **keys: Any) -> float:
    found = LossFunction(**keys).costs(
        torch.tensor([[error]]), torch.tensor([place]), torch.tensor([noise_ratio])
    )
    return float(found)


@pytest.mark.parametrize(
    ("schedule", "threshold"),
    [
        ("constant", C),
        ("exponential", math.exp(math.log(C) * 250 / 1000)),
        ("snr", (1 - C) / (1 + 0.5) ** 2 + C),
    ],
)
@pytest.mark.parametrize("error", [-3.0, 0.01])
def test_costs_are_kohyas(schedule: str, threshold: float, error: float) -> None:
    """library/train_util.py of sd-scripts: conditional_loss and get_huber_threshold_if_needed, of
    timestep 250 of 1000 and sigma 0.5."""
    line = math.sqrt(error**2 + threshold**2) - threshold
    given: dict[str, Any] = {"huber_c": C, "huber_schedule": schedule}
    found = costs(error, 0.25, 0.5, loss_type="huber", **given)
    assert found == pytest.approx(2 * threshold * line, rel=1e-6)
    found = costs(error, 0.25, 0.5, loss_type="smooth_l1", **given)
    assert found == pytest.approx(2 * line, rel=1e-6)
    assert costs(error, 0.25, 0.5, loss_type="l1", **given) == pytest.approx(abs(error))
    assert costs(error, 0.25, 0.5, **given) == pytest.approx(error**2)


@pytest.mark.parametrize("schedule", ["exponential", "snr"])
def test_a_threshold_falls_from_one_for_images_to_its_value_for_noise(schedule: str) -> None:
    """Also where nothing of the image is left."""
    found = LossFunction("huber", C, schedule).thresholds(
        torch.tensor([0.0, 0.5, 1.0]), torch.tensor([0.0, 1.0, math.inf])
    )
    assert found[0] == 1
    assert found[2] == pytest.approx(C)
    assert C < found[1] < 1


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction"])
def test_denoising_weighs_the_costs_by_min_snr(prediction_type: str) -> None:
    """The threshold is that of sqrt((1 - alphas_cumprod) / alphas_cumprod)."""
    scheduler = DDPMScheduler(beta_schedule="scaled_linear")
    schedule = NoiseSchedule(scheduler.alphas_cumprod, prediction_type)
    loss_function = LossFunction("huber", C)
    ours = Denoising(schedule, 5.0, loss_function)
    batch = images([0.0, 0.25, 0.999])
    timesteps = torch.tensor([0, 250, 999])
    target = batch["noise"]
    if prediction_type == "v_prediction":
        target = scheduler.get_velocity(batch["latents"], batch["noise"], timesteps)
    alphas = scheduler.alphas_cumprod[timesteps]
    c = ((1 - C) / (1 + ((1 - alphas) / alphas).sqrt()) ** 2 + C).view(-1, 1, 1, 1)
    expected = (2 * c * ((target**2 + c**2).sqrt() - c)).mean(dim=(1, 2, 3))
    expected *= ours.min_snr_weight(timesteps, 5.0)
    torch.testing.assert_close(ours.loss(torch.nn.Identity(), batch), expected)


@pytest.mark.parametrize("schedule", ["constant", "exponential", "snr"])
def test_flow_matching_weighs_the_costs_by_its_scheme(schedule: str) -> None:
    """The noise over the image is sigma / (1 - sigma), which snr makes (1 - c)(1 - sigma)^2 + c."""
    train = TrainConfig(
        loss_type="smooth_l1", huber_c=C, huber_schedule=schedule, weighting_scheme="cosmap"
    )
    ours = Flow(FlowMatchEulerDiscreteScheduler(), train.objective("sd3"))
    batch = images([0.0, 0.25, 0.9])
    sigma = torch.tensor([1.0, 0.75, 0.1])
    c = {"constant": C + 0 * sigma, "exponential": C**sigma,
         "snr": (1 - C) * (1 - sigma) ** 2 + C}[schedule].view(-1, 1, 1, 1)  # fmt: skip
    target = batch["noise"] - batch["latents"]
    expected = (2 * ((target**2 + c**2).sqrt() - c)).mean(dim=(1, 2, 3))
    expected *= ours.weights(sigma, batch["latents"])
    torch.testing.assert_close(ours.loss(torch.nn.Identity(), batch), expected)


@pytest.mark.parametrize("family", IMAGES)
def test_l2_has_no_keys_of_other_losses(family: str) -> None:
    """They are part of the objective of another loss."""
    plain = TrainConfig().objective(family)
    assert not {"loss_type", "huber_c", "huber_schedule"} & plain.keys()
    other = TrainConfig(loss_type="l1").objective(family)
    assert other == plain | {"loss_type": "l1", "huber_c": 0.1, "huber_schedule": "snr"}


def images(uniform: list[float]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    latents, noise = torch.randn(2, len(uniform), 4, 3, 3, generator=generator)
    return {
        "latents": latents,
        "noise": noise,
        "uniform": torch.tensor(uniform, dtype=torch.float64),
    }
