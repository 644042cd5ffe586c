"""Weights of samples and loss masks: by hand, in parts, and with no influence of what is masked."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from tests.builders.images import make_image_config, prepare_inputs, write_pictures
from tests.builders.phases import make_tiny_phase
from tests.training.conftest import Training
from tests.training.inputs import CAPTIONS, COUNT, SIDE
from tests.training.matrix import export_state

from zerotrain.cache.reader import read_cache
from zerotrain.config.training import TrainConfig
from zerotrain.models.families.objectives import (
    DenoisingObjective,
    FlowMatchingObjective,
    NoiseSchedule,
)
from zerotrain.state.position import StepCounter
from zerotrain.training import loop
from zerotrain.training.checkpointing import progress_folder
from zerotrain.training.reporting.log import NoLog

INPUTS = torch.tensor([1.0, 2.0, 3.0, 5.0])
WEIGHTS = torch.tensor([1.0, 0.5, 1.0, 0.25])


class Ddpm(DenoisingObjective):
    """A denoiser that answers with a given tensor."""

    def predict(self, model: Any, noisy: Any, timesteps: Any, batch: Any) -> torch.Tensor:
        return batch["answer"]


class Flow(FlowMatchingObjective):
    def predict(self, model: Any, noisy: Any, timesteps: Any, batch: Any) -> torch.Tensor:
        return batch["answer"]

    def image_tokens(self, latents: torch.Tensor) -> int:
        return 1


def make_objective(kind: str) -> Any:
    if kind == "ddpm":
        return Ddpm(NoiseSchedule(torch.linspace(0.99, 0.01, 10), "epsilon"))
    config = SimpleNamespace(num_train_timesteps=10, use_dynamic_shifting=False, shift=1.0)
    return Flow(SimpleNamespace(config=config), None)  # type: ignore[arg-type]


def make_batch(**more: torch.Tensor) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    shape = (2, 3, 4, 4)
    return {
        "latents": torch.randn(shape, generator=draw),
        "noise": torch.randn(shape, generator=draw),
        "uniform": torch.tensor([0.2, 0.7], dtype=torch.float64),
        "answer": torch.randn(shape, generator=draw).requires_grad_(),
        **more,
    }


@pytest.mark.parametrize("kind", ["ddpm", "flow"])
def test_what_is_masked_has_no_gradient_and_the_mean_is_over_all(kind: str) -> None:
    """Masks of 0 leave exact zeros; half a mask counts half; a mask of ones changes no bit."""
    objective = make_objective(kind)
    mask = torch.ones(2, 1, 4, 4)
    mask[0, :, :, :2], mask[1] = 0, 0.5
    plain, masked = make_batch(), make_batch(loss_mask=mask)
    whole = objective.loss(None, plain)
    found = objective.loss(None, masked)
    whole.sum().backward()
    found.sum().backward()
    before, after = plain["answer"].grad, masked["answer"].grad
    assert before is not None
    assert after is not None
    assert (after[0, :, :, :2] == 0).all()
    assert torch.equal(after[0, :, :, 2:], before[0, :, :, 2:])
    assert found[1] == whole[1] / 2
    ones = objective.loss(None, make_batch(loss_mask=torch.ones(2, 1, 4, 4)))
    assert torch.equal(ones, whole)


def accumulated(parts: int, weights: torch.Tensor | None) -> tuple[float, torch.Tensor]:
    """Loss and gradient of one step of four samples in so many parts; the loss is (w x)^2."""
    parameter = torch.tensor(2.0, requires_grad=True)
    size = len(INPUTS) // parts

    def read(first: int, size: int, device: torch.device) -> dict[str, torch.Tensor]:
        places = slice(first, first + size)
        weighed = {} if weights is None else {"loss_weight": weights[places]}
        return {"x": INPUTS[places], **weighed}

    engine: Any = SimpleNamespace(
        rank=0, world_size=1, device=torch.device("cpu"), model=None,
        micro_batch=lambda last: contextlib.nullcontext(),
        backward=lambda loss: (loss / parts).backward(),
    )  # fmt: skip
    objective: Any = SimpleNamespace(loss=lambda model, batch: (parameter * batch["x"]) ** 2)
    phase = make_tiny_phase("a", "torch", 1).with_values(
        global_batch_size=4, micro_batch_size=size, gradient_accumulation_steps=parts
    )
    batches: Any = SimpleNamespace(batch=read)
    loss, _ = loop._accumulate(engine, objective, batches, phase, StepCounter(0, 0, 1), NoLog())
    assert parameter.grad is not None
    return loss, parameter.grad


def test_a_weighted_loss_is_the_hand_computation_whole_and_in_parts() -> None:
    """sum(weight * loss) / number of samples, whole or in parts; weights of 1 change nothing."""
    by_hand = float((WEIGHTS * (2 * INPUTS) ** 2).sum() / 4)
    gradient = float((WEIGHTS * 4 * INPUTS**2).sum() / 4)
    for parts in (1, 2, 4):
        assert accumulated(parts, WEIGHTS) == (by_hand, gradient)
        assert accumulated(parts, torch.ones(4)) == accumulated(parts, None)


@pytest.mark.slow
def test_a_switch_changes_nothing_of_variants_weights_and_masks(tmp_path, server) -> None:
    """torch -> zero3_offload on two processes -> torch, against torch alone; and one batch against
    accumulation. Captions and crops have variants, images have masks and weigh a half."""
    images = write_pictures(tmp_path / "images", CAPTIONS, SIDE, COUNT)
    for number, file in enumerate(sorted(images.glob("*.png"))):
        image = Image.open(file).resize([(40, 40), (80, 24)][number % 2]).convert("RGBA")
        image.paste((0, 0, 0, 0), (0, 0, 12, 40))
        image.save(file)
    data = {
        "aspect_buckets": {"alignment": 8, "max_aspect": 4.0, "crop": "random", "crop_variants": 2},
        "shuffle_caption": True, "caption_tag_dropout_rate": 0.3,
        "random_flip": True, "loss_mask": "alpha", "loss_weight": 0.5,
    }  # fmt: skip
    prepare_inputs(make_image_config(images, family="sdxl", data=data), tmp_path, steps=3)
    sample = read_cache(tmp_path / "cache").sample(0)
    assert sample["loss_mask"].min() == 0
    training = Training(tmp_path, tmp_path, server)
    shape = {
        "family": "sdxl", "resolution": SIDE, "epoch_size": COUNT, "lr_warmup_steps": 0,
        "objective": TrainConfig().objective("sdxl"),
    }  # fmt: skip
    expected = training.run("whole", "torch", 6, **shape)
    training.run("first", "torch", 2, **shape)

    def state(name: str, step: int) -> Path:
        rolling = progress_folder.step_folder(training.progress(name), step)
        return export_state(rolling, training.folder / f"{name}-state")

    second = state("first", 2)
    training.run("second", "zero3_offload", 4, state=second, num_processes=2, **shape)
    found = training.run("third", "torch", 6, state=state("second", 4), **shape)
    assert found[:2] == expected[:2]
    assert found == pytest.approx(expected, rel=1e-5)
    parts = training.run("parts", "torch", 6, gradient_accumulation_steps=4, **shape)
    assert parts == pytest.approx(expected, rel=1e-5)
