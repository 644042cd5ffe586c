"""Flux learns from conditioning images: from folders to weights that its pipelines load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image
from tests.builders.images import (
    build_nano,
    make_image_config,
    prepare_inputs,
    write_pictures,
)
from tests.training.conftest import Training, trained_model
from tests.training.inputs import LORA, SIDE

from zerotrain.cache.reader import read_cache, stacked
from zerotrain.config.training import TrainConfig
from zerotrain.models.families.flux import FAMILY

pytestmark = pytest.mark.slow

COUNT, STEPS = 12, 40
ADAPTER = {**LORA, "rank": 8, "target_modules": ["to_q", "to_v", "x_embedder", "proj_out"]}


@pytest.fixture(scope="module")
def inputs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images to copy: from a conditioning image, or what a mask leaves of them."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    fill = request.param == "FluxFillPipeline"
    names = ("images", "before", "masks") if fill else ("images", "before")
    white = Image.new("L", (SIDE, SIDE))
    white.paste(255, (SIDE // 2, 0, SIDE, SIDE))
    for name in names:
        write_pictures(folder / name, ["a picture"], SIDE, COUNT)
        for number in range(COUNT if name == "masks" else 0):
            white.save(folder / name / f"{number}.png")
    if fill:
        build_nano("flux", folder / "fill", steps=60, pipeline=request.param)
    config = make_image_config(
        folder / "images", family="flux", base=str(folder / "fill") if fill else "nano",
        data={"conditioning_images": [str(folder / name) for name in names[1:]]},
    )  # fmt: skip
    prepare_inputs(config, folder, steps=60)
    return folder


@pytest.mark.parametrize(
    "inputs",
    ["FluxKontextPipeline", pytest.param("FluxFillPipeline", marks=pytest.mark.soak)],
    indirect=True,
)
def test_training_learns_to_copy_and_diffusers_loads_it(inputs, tmp_path, server):
    """The loss falls by a tenth and more, and is larger with others' conditioning images; the class
    of the base's own pipeline loads the weights, which answer as the trained model does."""
    training = Training(tmp_path, inputs, server)
    training.run(
        "copy", "torch", STEPS, family="flux", objective=TrainConfig().objective("flux"),
        resolution=SIDE, epoch_size=COUNT, learning_rate=5e-3, lr_warmup_steps=0, lora=ADAPTER,
    )  # fmt: skip
    weights, _ = training.export("copy", STEPS, "flux", lora=ADAPTER)

    trained = trained_model("flux", inputs / "base", training.rolling("copy", STEPS), ADAPTER)
    batch = batch_of(inputs)
    [name] = {"conditioning_latents", "fill_condition"} & batch.keys()
    before = loss(inputs, FAMILY.load_model(inputs / "base").eval(), batch)
    after = loss(inputs, trained, batch)
    other = loss(inputs, trained, {**batch, name: batch[name].roll(1, dims=0)})
    print(f"{name}: loss {before:.4f}, trained {after:.4f}, with others' images {other:.4f}")
    assert after < 0.9 * before
    assert after < other

    pipeline = DiffusionPipeline.from_pretrained(weights)
    assert type(pipeline).__name__ == inputs.name.rstrip("0123456789")
    pipeline.load_lora_weights(weights)
    assert loss(inputs, pipeline.transformer, batch) == after


def batch_of(inputs: Path) -> dict[str, Any]:
    """All samples, each with noise and a timestep of its own."""
    cache = read_cache(inputs / "cache")
    source = torch.Generator().manual_seed(1)
    samples = []
    for number in range(COUNT):
        sample = cache.sample(number)
        sample["noise"] = torch.randn(sample["latents"].shape, generator=source)
        sample["uniform"] = torch.tensor((number + 0.5) / COUNT, dtype=torch.float64)
        samples.append(sample)
    return stacked(samples, torch.device("cpu"))


@torch.no_grad()
def loss(inputs: Path, model: torch.nn.Module, batch: dict[str, Any]) -> float:
    """Mean loss of a batch."""
    return float(FAMILY.objective(inputs / "base").loss(model, batch).mean())
