"""Flux learns from conditioning images: from folders to weights that its pipelines load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image
from tests.families.conftest import CAPTIONS, pictures
from tests.training.conftest import Training, trained_model
from tests.training.inputs import LORA, SIDE

from zerotrain.cache import read_cache, stacked
from zerotrain.config.read import parse_config
from zerotrain.config.training import TrainConfig
from zerotrain.export.export import export
from zerotrain.export.target import WeightsTarget
from zerotrain.models.families import flux_nano
from zerotrain.models.families import nano as nano_parts
from zerotrain.models.families.flux import FAMILY
from zerotrain.stages.build_base import BuildSettings, build_base
from zerotrain.stages.cache_latents import CacheSettings, cache_latents
from zerotrain.stages.prepare_dataset import prepare_dataset
from zerotrain.state.checkpoint import Checkpoint
from zerotrain.training.checkpointing import progress_folder

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
        (folder / name).mkdir()
    for number, image in enumerate(pictures(SIDE, COUNT)):
        (folder / "images" / f"{number}.txt").write_text("a picture")
        for name in names:
            (white if name == "masks" else image).save(folder / name / f"{number}.png")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nano_parts, "VAE_STEPS", 60)
        if fill:
            flux_nano.SMALL.build(
                CAPTIONS, pictures(SIDE, COUNT), 0, folder / "fill", pipeline=request.param
            )
        raw = {
            "run": "r",
            "family": "flux",
            "base": str(folder / "fill") if fill else "nano",
            "data": {
                "images": str(folder / "images"),
                "conditioning_images": [str(folder / name) for name in names[1:]],
                "num_workers": 0,
            },
            "train": {"resolution": SIDE},
            "launch": {"num_cpu_threads_per_process": 1},
            "phases": [{"name": "p", "until": 1}],
        }
        config = parse_config(raw, "test")
        prepare_dataset(config.data, folder / "dataset")
        build_base(BuildSettings.of(config), folder / "dataset", folder / "base")
    settings = CacheSettings.of(config)
    cache_latents(settings, SIDE, folder / "dataset", folder / "base", folder / "cache")
    return folder


@pytest.mark.parametrize(
    ("inputs", "adapter"),
    [
        pytest.param("FluxKontextPipeline", True, id="kontext-lora"),
        pytest.param("FluxFillPipeline", False, id="fill-full"),
        pytest.param("FluxKontextPipeline", False, id="kontext-full", marks=pytest.mark.soak),
        pytest.param("FluxFillPipeline", True, id="fill-lora", marks=pytest.mark.soak),
    ],
    indirect=["inputs"],
)
def test_training_learns_to_copy_and_diffusers_loads_it(inputs, adapter, tmp_path, server):
    """The loss falls by a tenth and more, and is larger with others' conditioning images; the class
    of the base's own pipeline loads the weights, which answer as the trained model does."""
    training = Training(tmp_path, inputs, server)
    training.run(
        "copy", "torch", STEPS, family="flux", objective=TrainConfig().objective("flux"),
        resolution=SIDE, epoch_size=COUNT, learning_rate=5e-3 if adapter else 1e-3,
        lr_warmup_steps=0, **({"lora": ADAPTER} if adapter else {}),
    )  # fmt: skip
    rolling = progress_folder.step_folder(training.progress("copy"), STEPS)
    lora = ADAPTER if adapter else None
    target = WeightsTarget(tmp_path / "weights", inputs / "base", FAMILY, "fp32", lora=lora)
    export(Checkpoint(rolling), rolling, target, None)

    trained = trained_model("flux", inputs / "base", rolling, lora)
    batch = batch_of(inputs)
    [name] = {"conditioning_latents", "fill_condition"} & batch.keys()
    before = loss(inputs, FAMILY.load_model(inputs / "base").eval(), batch)
    after = loss(inputs, trained, batch)
    other = loss(inputs, trained, {**batch, name: batch[name].roll(1, dims=0)})
    print(f"{name}: loss {before:.4f}, trained {after:.4f}, with others' images {other:.4f}")
    assert after < 0.9 * before
    assert after < other

    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "weights")
    assert type(pipeline).__name__ == inputs.name.rstrip("0123456789")
    if adapter:
        pipeline.load_lora_weights(tmp_path / "weights")
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
