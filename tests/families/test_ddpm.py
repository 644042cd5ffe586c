"""The denoising objective against diffusers' own scheduler and the papers' formulas."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from diffusers import DDPMScheduler
from diffusers.training_utils import compute_snr

from zerotrain.errors import PipelineError
from zerotrain.models.families.objectives import (
    DenoisingObjective,
    NoiseSchedule,
    read_noise_schedule,
)

SDXL = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "num_train_timesteps": 1000,
}
PREDICTIONS = ["epsilon", "v_prediction"]


class Recording(DenoisingObjective):
    """An objective whose denoiser answers as the test says; it keeps what it was asked."""

    def __init__(self, schedule: NoiseSchedule) -> None:
        super().__init__(schedule)
        self.answer = torch.zeros(())

    def predict(self, denoiser, noisy, timesteps, batch):
        self.noisy, self.asked = noisy, timesteps
        return self.answer.expand_as(noisy)


def objective(prediction_type: str, **changes: object) -> tuple[Recording, DDPMScheduler]:
    """An objective and diffusers' scheduler of the same schedule."""
    scheduler = DDPMScheduler(prediction_type=prediction_type, **SDXL | changes)
    return Recording(NoiseSchedule(scheduler.alphas_cumprod, prediction_type)), scheduler


def batch(uniform: list[float]) -> dict[str, torch.Tensor]:
    """Samples at these places of the schedule."""
    generator = torch.Generator().manual_seed(0)
    latents, noise = torch.randn(2, len(uniform), 4, 3, 3, generator=generator)
    place = torch.tensor(uniform, dtype=torch.float64)
    return {"latents": latents, "noise": noise, "uniform": place}


@pytest.mark.parametrize("prediction_type", PREDICTIONS)
def test_families_learn_the_target_that_diffusers_defines(prediction_type):
    """The noisy latents and the target are those of diffusers' add_noise and get_velocity."""
    ours, scheduler = objective(prediction_type)
    given = batch([0.0, 0.25, 0.9999])
    timesteps = torch.tensor([0, 250, 999])
    loss = ours.loss(torch.nn.Identity(), given)
    target = {
        "epsilon": given["noise"],
        "v_prediction": scheduler.get_velocity(given["latents"], given["noise"], timesteps),
    }[prediction_type]
    assert torch.equal(ours.asked, timesteps)
    torch.testing.assert_close(
        ours.noisy, scheduler.add_noise(given["latents"], given["noise"], timesteps)
    )
    torch.testing.assert_close(loss, target.square().mean(dim=(1, 2, 3)))


def test_families_give_no_loss_to_a_perfect_prediction():
    """A denoiser that answers with the noise has loss 0 in every sample."""
    ours, _ = objective("epsilon")
    given = batch([0.1, 0.5])
    ours.answer = given["noise"]
    ours.snr_gamma = 5.0
    assert torch.equal(ours.loss(torch.nn.Identity(), given), torch.zeros(2))


@pytest.mark.parametrize("prediction_type", PREDICTIONS)
def test_min_snr_weights_are_those_of_the_diffusers_scripts(prediction_type):
    """min(SNR, gamma) / SNR for epsilon, min(SNR, gamma) / (SNR + 1) for v."""
    ours, scheduler = objective(prediction_type)
    timesteps = torch.arange(0, 1000, 7)
    snr = compute_snr(scheduler, timesteps)
    expected = snr.clamp(max=5.0) / (snr + (prediction_type == "v_prediction"))
    torch.testing.assert_close(ours.min_snr_weight(timesteps, 5.0), expected, rtol=1e-4, atol=1e-6)
    given = batch([0.02, 0.7])
    plain = ours.loss(torch.nn.Identity(), given)
    ours.snr_gamma = 5.0
    torch.testing.assert_close(
        ours.loss(torch.nn.Identity(), given),
        plain * ours.min_snr_weight(torch.tensor([20, 700]), 5.0),
    )


def test_min_snr_weighs_an_error_in_the_image_alike_for_both_predictions():
    """The same wrong image costs min(SNR, gamma) times its error, whatever is predicted."""
    error, losses = 0.3, {}
    for prediction_type in PREDICTIONS:
        ours, scheduler = objective(prediction_type)
        given = batch([0.3])
        alpha = scheduler.alphas_cumprod[300].sqrt()
        sigma = (1 - scheduler.alphas_cumprod[300]).sqrt()
        image = given["latents"] + error
        noisy = alpha * given["latents"] + sigma * given["noise"]
        noise = (noisy - alpha * image) / sigma
        ours.answer = noise if prediction_type == "epsilon" else alpha * noise - sigma * image
        ours.snr_gamma = 5.0
        losses[prediction_type] = ours.loss(torch.nn.Identity(), given).item()
    snr = (alpha / sigma).square().item()
    assert losses["epsilon"] == pytest.approx(min(snr, 5.0) * error**2, rel=1e-4)
    assert losses["v_prediction"] == pytest.approx(losses["epsilon"], rel=1e-4)


def test_min_snr_weights_stay_finite_where_no_signal_is_left():
    """A zero-terminal schedule has SNR 0 at its last timestep."""
    for prediction_type in PREDICTIONS:
        ours, _ = objective(prediction_type, rescale_betas_zero_snr=True)
        assert torch.isfinite(ours.min_snr_weight(torch.tensor([999]), 5.0)).all()


def test_every_timestep_is_equally_likely_and_the_last_is_reached():
    ours, _ = objective("epsilon")
    uniform = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    assert torch.bincount(ours.timesteps(uniform)).tolist() == [4] * 1000


def test_the_schedule_of_a_sampler_is_that_of_its_training(tmp_path: Path):
    """A base names a sampler (SDXL: Euler); its betas and prediction type are what counts."""
    document = {"_class_name": "EulerDiscreteScheduler", "prediction_type": "v_prediction", **SDXL}
    (tmp_path / "scheduler_config.json").write_text(json.dumps(document))
    schedule = read_noise_schedule(tmp_path)
    assert schedule.prediction_type == "v_prediction"
    assert torch.equal(schedule.alphas_cumprod, DDPMScheduler(**SDXL).alphas_cumprod)


@pytest.mark.parametrize(
    ("name", "prediction_type"),
    [
        ("EDMDPMSolverMultistepScheduler", "epsilon"),
        ("FlowMatchEulerDiscreteScheduler", "epsilon"),
        ("DDPMScheduler", "sample"),
    ],
)
def test_a_schedule_of_another_kind_is_refused(tmp_path: Path, name, prediction_type):
    document = {"_class_name": name, "prediction_type": prediction_type}
    (tmp_path / "scheduler_config.json").write_text(json.dumps(document))
    with pytest.raises(PipelineError, match=f"{name} with prediction_type '{prediction_type}'"):
        read_noise_schedule(tmp_path)
