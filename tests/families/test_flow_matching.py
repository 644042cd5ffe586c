"""The flow matching objective against diffusers' own scheduler and training functions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.training_utils import (
    compute_density_for_timestep_sampling,
    compute_loss_weighting_for_sd3,
)

from zerotrain.config.training import TrainConfig
from zerotrain.errors import PipelineError
from zerotrain.models.families.objectives import FlowMatchingObjective, read_flow_scheduler

TOKENS = 1024
COUNT = 100_000


class Recording(FlowMatchingObjective):
    """An objective whose model answers as the test says; it keeps what it was asked."""

    answer = torch.zeros(())

    def predict(self, model, noisy, timesteps, batch):
        self.noisy, self.asked = noisy, timesteps
        return self.answer.expand_as(noisy)

    def image_tokens(self, latents):
        return TOKENS


def objective(scheduler: dict[str, Any] | None = None, **train: Any) -> Recording:
    """An objective as a configuration asks for it, of the family sd3."""
    settings = TrainConfig(**train).objective("sd3")
    return Recording(FlowMatchEulerDiscreteScheduler(**scheduler or {}), settings, "logit_normal")


def evenly() -> torch.Tensor:
    return (torch.arange(COUNT, dtype=torch.float64) + 0.5) / COUNT


def batch(uniform: list[float]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    latents, noise = torch.randn(2, len(uniform), 4, 3, 3, generator=generator)
    return {"latents": latents, "noise": noise, "uniform": torch.tensor(uniform).double()}


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_timesteps_and_noisy_latents_are_those_of_the_scheduler(shift: float) -> None:
    """Index by index: the scheduler's table of timesteps, and its scale_noise."""
    ours = objective({"shift": shift}, weighting_scheme="none")
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    given = batch([0.0, 0.25, 0.9999])
    loss = ours.loss(torch.nn.Identity(), given)
    timesteps = scheduler.timesteps[[0, 250, 999]]
    torch.testing.assert_close(ours.asked, timesteps, rtol=1e-6, atol=1e-4)
    expected = scheduler.scale_noise(given["latents"], timesteps, given["noise"])
    torch.testing.assert_close(ours.noisy, expected, rtol=1e-5, atol=1e-5)
    target = given["noise"] - given["latents"]
    torch.testing.assert_close(loss, target.square().mean(dim=(1, 2, 3)))


def test_a_perfect_velocity_has_no_loss() -> None:
    ours, given = objective(), batch([0.1, 0.5])
    ours.answer = given["noise"] - given["latents"]
    assert torch.equal(ours.loss(torch.nn.Identity(), given), torch.zeros(2))


@pytest.mark.parametrize(
    "scheme",
    [
        {"weighting_scheme": "logit_normal"},
        {"weighting_scheme": "logit_normal", "logit_mean": 0.7, "logit_std": 0.5},
        {"weighting_scheme": "mode", "mode_scale": 0.8},
        {"weighting_scheme": "none"},
    ],
)
def test_draws_have_the_density_of_diffusers(scheme: dict[str, Any]) -> None:
    """Deciles of the sigmas; the family's own scheme where none is named."""
    ours = objective(**scheme).sigmas(evenly(), torch.zeros(1))
    numbers = {"logit_mean": 0.0, "logit_std": 1.0, "mode_scale": 1.29, **scheme}
    drawn = compute_density_for_timestep_sampling(
        batch_size=COUNT, generator=torch.Generator().manual_seed(0), **numbers
    )
    table = FlowMatchEulerDiscreteScheduler().timesteps / 1000
    theirs = table[(drawn * 1000).long().clamp(0, 999)]
    deciles = torch.linspace(0.1, 0.9, 9)
    torch.testing.assert_close(ours.quantile(deciles), theirs.quantile(deciles), rtol=0, atol=0.01)
    if scheme == {"weighting_scheme": "logit_normal"}:
        assert torch.equal(objective().sigmas(evenly(), torch.zeros(1)), ours)


@pytest.mark.parametrize("scheme", ["sigma_sqrt", "cosmap", "logit_normal"])
def test_weights_are_those_of_diffusers(scheme: str) -> None:
    ours, given = objective(weighting_scheme=scheme), batch([0.02, 0.7])
    plain = (given["noise"] - given["latents"]).square().mean(dim=(1, 2, 3))
    sigmas = ours.sigmas(given["uniform"], given["latents"])
    expected = compute_loss_weighting_for_sd3(scheme, sigmas)
    torch.testing.assert_close(ours.loss(torch.nn.Identity(), given), plain * expected)


def test_gaussian_weights_are_diffsynths() -> None:
    """exp(-2 (sigma - 1/2)^2), 0 at its least and 1 on average over the shifted schedule.

    The numbers are those of DiffSynth-Studio's FlowMatchScheduler for FLUX.1, at those of its 1000
    timesteps that are nearest.
    """
    ours, given = objective(weighting_scheme="gaussian", flow_shift=3.0), batch([0.1, 0.5, 0.9])
    plain = (given["noise"] - given["latents"]).square().mean(dim=(1, 2, 3))
    table = 3 * (line := torch.linspace(1, 0.003 / 1.002, 1000)) / (1 + 2 * line)
    curve = torch.exp(-2 * (table - 0.5) ** 2)
    curve = (curve - curve.min()) / (curve - curve.min()).mean()
    sigmas = ours.sigmas(given["uniform"], given["latents"])
    expected = curve[(table[:, None] - sigmas).abs().argmin(dim=0)]
    weights = ours.loss(torch.nn.Identity(), given) / plain
    torch.testing.assert_close(weights, expected, rtol=5e-3, atol=0)


def test_a_dynamic_shift_follows_the_number_of_tokens() -> None:
    """As the pipeline shifts its sigmas at this resolution; flow_shift takes its place."""
    dynamic = {"use_dynamic_shifting": True, "base_image_seq_len": 256, "max_image_seq_len": 4096}
    scheduler = FlowMatchEulerDiscreteScheduler(**dynamic)
    slope = (1.15 - 0.5) / (4096 - 256)
    scheduler.set_timesteps(sigmas=[1.0, 0.7, 0.2], mu=0.5 + slope * (TOKENS - 256))
    ours = objective(dynamic, weighting_scheme="none")
    found = ours.sigmas(torch.tensor([0.0, 0.3, 0.8]), torch.zeros(1))
    torch.testing.assert_close(found, scheduler.sigmas[:3])
    fixed = objective(dynamic, weighting_scheme="none", flow_shift=1.0)
    found = fixed.sigmas(torch.tensor([0.0, 0.3, 0.8]), torch.zeros(1))
    torch.testing.assert_close(found, torch.tensor([1.0, 0.7, 0.2]))


def test_preconditioned_outputs_compare_images() -> None:
    """examples/dreambooth/train_dreambooth_sd3.py: the prediction becomes an image, the target is
    the image."""
    plain, ours = objective(flow_shift=3.0), objective(flow_shift=3.0, precondition_outputs=True)
    given = batch([0.1, 0.5, 0.9])
    sigmas = plain.sigmas(given["uniform"], given["latents"]).view(-1, 1, 1, 1)
    noisy = (1 - sigmas) * given["latents"] + sigmas * given["noise"]  # the model predicts 0
    expected = (noisy - given["latents"]).square().mean(dim=(1, 2, 3))
    torch.testing.assert_close(ours.loss(torch.nn.Identity(), given), expected)


def test_evaluations_compare_the_plain_loss() -> None:
    """Whatever the training draws and weighs."""
    plain = Recording(FlowMatchEulerDiscreteScheduler(shift=3.0), None, "logit_normal")
    assert plain.sigmas(torch.tensor([0.25]), torch.zeros(1)).item() == 0.75
    assert torch.equal(plain.weights(torch.tensor([0.1, 0.9]), torch.zeros(1)), torch.ones(2))


def test_no_draw_leaves_the_schedule() -> None:
    """The ends of the numbers, where the normal distribution is infinite."""
    ends = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    for scheme in ("none", "logit_normal", "mode"):
        found = objective(weighting_scheme=scheme).sigmas(ends, torch.zeros(1))
        assert torch.isfinite(found).all()
        assert 0 < found.min() <= found.max() <= 1


def test_a_schedule_of_another_kind_is_refused(tmp_path: Path) -> None:
    document = {"_class_name": "DDPMScheduler"}
    (tmp_path / "scheduler_config.json").write_text(json.dumps(document))
    with pytest.raises(PipelineError, match="DDPMScheduler is not a schedule of flow matching"):
        read_flow_scheduler(tmp_path)
