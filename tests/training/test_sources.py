"""Training on several sources of images."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.builders.images import make_image_config, prepare_inputs, write_pictures
from tests.builders.phases import PRESETS, make_tiny_phase
from tests.training.conftest import Training, write_cache
from tests.training.matrix import deviation

from zerotrain.cache.reader import read_cache
from zerotrain.launch.files import read_run_yaml
from zerotrain.stages.render_launch import LaunchSettings, render_launch
from zerotrain.training.batches import Batches

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


@pytest.mark.slow
def test_a_switch_changes_nothing_of_fractional_repeats(training, tmp_path):
    """torch -> zero3 on one process, and on two and back: the losses of torch alone, as close as
    with whole repeats; the order of the samples knows no launch."""
    shares, batch, until = (1.0, 0.75, 1.5), 4, 10
    training.cache = tmp_path / "cache"
    write_cache(training.cache, shares=shares)
    batches = Batches(read_cache(training.cache), make_tiny_phase("a", "torch", until))
    drawn = [batches.name(position) for position in range(until * batch)]
    counts = Counter(int(name.removesuffix(".png")) % len(shares) for name in drawn)
    assert [counts[kind] for kind in range(len(shares))] == [12, 8, 20]
    whole = training.run("whole", "torch", until, save_every=3, keep=9)
    state = training.export_state("whole", 3)
    alone = training.run("alone", "zero3", until, state=state)
    assert alone[:3] == whole[:3]
    assert deviation(alone, whole) <= 1e-6
    training.run("pair", "zero3", 6, state=state, num_processes=2)
    back = training.run("back", "torch", until, state=training.export_state("pair", 6))
    assert deviation(back, whole) <= 1e-5
