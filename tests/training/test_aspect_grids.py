"""Trained models draw what they were trained on, in wide images and in tall ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.builders.images import make_image_config, prepare_inputs
from tests.builders.phases import PRESETS
from tests.training.conftest import Training

from zerotrain.config.run import RunConfig
from zerotrain.config.stage_settings import EvaluateSettings
from zerotrain.evaluation.images import measure_images
from zerotrain.stages.render_launch import LaunchSettings, render_launch

COLOURS = {"blue": (30, 60, 220), "yellow": (240, 210, 30)}
GRIDS = {(40, 24): (372, 108), (24, 40): (308, 172)}
"""Sizes of the images, and of a grid of two prompts with two of them each."""
SIDE, STEPS = 32, 40
NEAR = 70
"""Distance between two colours."""


def configure(family: str, images: Path) -> RunConfig:
    """A run on a wall of each colour in each size."""
    images.mkdir()
    for name, colour in COLOURS.items():
        for size in GRIDS:
            file = images / f"{name}-{size[0]}.png"
            Image.new("RGB", size, colour).save(file)
            file.with_suffix(".txt").write_text(f"a {name} wall")
    return make_image_config(
        images, family=family, data={"aspect_buckets": {"alignment": 8}},
        train={"resolution": SIDE, "global_batch_size": 4, "learning_rate": 2e-3,
               "lr_scheduler": "constant_with_warmup", "lr_warmup_steps": 5},
        phases=[{"name": "a", "until": STEPS, "launch": "torch"}],
        evaluate={"prompts": [f"a {name} wall" for name in COLOURS], "images_per_prompt": 2,
                  "num_inference_steps": 6, "guidance_scale": 1.0, "sizes": [*GRIDS]},
    )  # fmt: skip


def sample(config: RunConfig, folder: Path, weights: Path, output: Path) -> Path:
    """The grids and the samples of weights, as the evaluation has them."""
    settings = EvaluateSettings.of(config, "a")
    output.mkdir()
    measure_images(settings, folder / "dataset", folder / "cache", weights, "cpu").write(output)
    return output


def distances(output: Path, size: tuple[int, int]) -> np.ndarray:
    """How far the mean colour of each image [prompt, column] is from that of its prompt."""
    files = [f"samples-{size[0]}x{size[1]}/{row:02d}-{column:02d}.png" for row in range(2)
             for column in range(2)]  # fmt: skip
    images = [Image.open(output / file) for file in files]
    assert {image.size for image in images} == {size}
    means = np.array([np.asarray(image).mean((0, 1)) for image in images]).reshape(2, 2, 3)
    found: np.ndarray = np.linalg.norm(means - np.array([*COLOURS.values()])[:, None], axis=-1)
    return found


@pytest.mark.soak
@pytest.mark.parametrize("family", ["sdxl", "sd3"])
def test_a_trained_model_draws_the_prompts_colour_at_two_aspects(
    family: str, tmp_path: Path, server: Any
) -> None:
    """Of each image the mean is near the colour that its prompt names; those of an untrained model
    have either."""
    config = configure(family, tmp_path / "images")
    prepare_inputs(config, tmp_path, SIDE, steps=60)
    dataset, launch = tmp_path / "dataset", tmp_path / "a/launch"
    settings = LaunchSettings.of(config, "a")
    render_launch(settings, dataset, PRESETS / "torch.yaml", tmp_path / "base", None, launch)
    training = Training(tmp_path, tmp_path, server)
    training.train("a")
    weights, _ = training.export("a", STEPS, family)
    trained = sample(config, tmp_path, weights, tmp_path / "trained")
    untrained = sample(config, tmp_path, tmp_path / "base", tmp_path / "untrained")
    for size, shape in GRIDS.items():
        assert Image.open(trained / f"grid-{size[0]}x{size[1]}.png").size == shape
        assert (distances(trained, size) < NEAR).all()
    assert not all((distances(untrained, size) < NEAR).all() for size in GRIDS)
