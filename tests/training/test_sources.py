"""Training on several sources of images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.builders.images import make_image_config, prepare_inputs, write_pictures
from tests.builders.phases import PRESETS
from tests.training.conftest import Training

from zerotrain.launch.run_yaml import read_run_yaml
from zerotrain.stages.render_launch import LaunchSettings, render_launch

STEPS = 5


def train(place: Path, folder: Path, server: Any, **data: Any) -> list[float]:
    """The losses of a small SDXL on some images."""
    config = make_image_config(
        folder, data={"images": None, **data}, family="sdxl",
        train={"global_batch_size": 2, "log_every": 1},
        phases=[{"name": "a", "until": STEPS, "launch": "torch"}],
    )  # fmt: skip
    place.mkdir()
    prepare_inputs(config, place, steps=1)
    settings, preset = LaunchSettings.of(config, "a"), PRESETS / "torch.yaml"
    render_launch(settings, place / "dataset", preset, place / "base", None, place / "a/launch")
    return Training(place, place, server).train("a")


@pytest.mark.slow
def test_sources_are_trained_as_their_images_in_one_folder(tmp_path, server):
    """To the last bit: the losses of two sources are those of a folder with both in it; other
    repeats and another resolution of one source train on other samples."""
    folder = tmp_path / "images"
    folder.mkdir()
    write_pictures(folder / "cats", ["a cat"], count=3)
    write_pictures(folder / "dogs", ["a dog"], count=2)
    cats = {"name": "cats", "images": str(folder / "cats"), "repeats": 2}
    dogs = {"name": "dogs", "images": str(folder / "dogs"), "repeats": 2}
    together = train(tmp_path / "folder", folder, server, images=str(folder), repeats=2)
    apart = train(tmp_path / "sources", folder, server, sources=[cats, dogs])
    assert apart == together
    assert len(apart) == STEPS
    own = dogs | {"repeats": 5, "resolution": 8}
    other = train(tmp_path / "own", folder, server, sources=[cats, own])
    assert read_run_yaml(tmp_path / "own/a/launch/run.yaml").derived.epoch_size == 16
    assert len(other) == STEPS
    assert other != together
