"""Training on images of several sizes: as exact as on squares."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.builders.phases import SAMPLES, make_tiny_phase
from tests.training.conftest import Training, write_base, write_cache
from tests.training.inputs import COUNT, image_values, write_image_inputs
from tests.training.kill_point import KillPoint
from tests.training.matrix import deviation

from zerotrain.cache.reader import read_cache
from zerotrain.state.checkpoint import Checkpoint
from zerotrain.training.batches import Batches
from zerotrain.training.checkpointing import progress_folder

EPOCH = COUNT // 4
"""Steps of the nano models' images, of which each size fills one."""
SIZES = ((64, 64), (48, 80), (80, 48), (64, 64), (32, 96))
CPU = torch.device("cpu")
VALIDATION = {
    "eval_steps": 4, "eval_on_start": False, "max_samples": 64, "batch_size": 3,
    "metric_for_best_model": "val_loss", "load_best_model_at_end": False,
    "early_stopping_patience": None, "early_stopping_threshold": 0.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def bucketed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and a cache of images of four sizes."""
    folder = tmp_path_factory.mktemp("bucketed")
    write_base(folder / "base", (9, 15))
    write_cache(folder / "cache", sizes=SIZES)
    return folder


@pytest.fixture(scope="module")
def nano_inputs(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Gives the folder of a family's nano model and its cache of images of three shapes."""

    @cache
    def make(family: str, *, conditioned: bool) -> Path:
        folder = tmp_path_factory.mktemp(family)
        buckets = {"alignment": 8, "min_aspect": 0.25, "max_aspect": 4.0}
        sizes = [(40, 40), (80, 24), (20, 60)]
        write_image_inputs(family, folder, sizes, conditioned=conditioned, aspect_buckets=buckets)
        return folder

    return make


@pytest.fixture
def nano(
    tmp_path: Path, nano_inputs: Callable[..., Path], server: Any
) -> Callable[[str], Training]:
    """Gives a run of a family's nano model on these."""
    return lambda family: Training(tmp_path, nano_inputs(family, conditioned=False), server)


@pytest.fixture
def training(tmp_path: Path, bucketed: Path, server: Any) -> Training:
    return Training(tmp_path, bucketed, server)


def test_a_batch_has_one_size_and_every_sample_comes_equally_often(bucketed):
    """Over 24 steps of 4, each of 24 samples is used four times, or a batch more or less."""
    cache = read_cache(bucketed / "cache")
    batches = Batches(cache, make_tiny_phase("a", "torch", 4))
    shapes, names = set(), []
    for step in range(SAMPLES):
        batch = batches.batch(4 * step, 4, CPU)
        shape = tuple(batch["latents"].shape)
        assert batch["noise"].shape == shape
        assert batch["target_size"].tolist() == [[8 * shape[2], 8 * shape[3]]] * 4
        shapes.add(shape[2:])
        names += [batches.name(4 * step + row) for row in range(4)]
    assert shapes == {(height // 8, width // 8) for height, width in SIZES}
    counts = [names.count(f"{number}.png") for number in range(SAMPLES)]
    assert sum(counts) == 4 * SAMPLES
    assert 3 <= min(counts) <= max(counts) <= 5


def test_a_size_of_fewer_images_than_a_batch_is_named(bucketed, inputs):
    """Of 24 training images 10 are squares, 5 of each two other sizes, 4 of the last."""
    cache = read_cache(bucketed / "cache")
    phase = make_tiny_phase("a", "torch", 4)
    assert Batches(cache, phase).describe_small_buckets() is None
    said = Batches(cache, phase.with_values(global_batch_size=8)).describe_small_buckets()
    assert said
    assert said.startswith(
        "3 of 4 sizes of images have fewer than a batch of 8, 96x32 has 4: such a batch holds"
    )
    squares = Batches(read_cache(inputs / "cache"), phase.with_values(global_batch_size=64))
    assert squares.describe_small_buckets() is None


def weights(training: Training, name: str, step: int) -> dict[str, torch.Tensor]:
    source = Checkpoint(progress_folder.step_folder(training.progress(name), step))
    return {key: source.tensor(key, "master") for key in source.names}


@pytest.mark.slow
def test_a_batch_trains_as_its_images_one_by_one(training):
    """Four accumulations of one image give the losses and weights of one batch, but for rounding;
    held-out images of other sizes are measured alike."""
    together = training.run("together", "torch", 8, validation=VALIDATION)
    apart = training.run("apart", "torch", 8, validation=VALIDATION, gradient_accumulation_steps=4)
    assert apart == pytest.approx(together, rel=2e-6)
    one, other = weights(training, "together", 8), weights(training, "apart", 8)
    for key, tensor in one.items():
        torch.testing.assert_close(other[key], tensor, rtol=1e-4, atol=1e-6)
    measured = [
        [line["val_loss"] for line in training.log(name) if "val_loss" in line]
        for name in ("together", "apart")
    ]
    assert len(measured[0]) == 2
    assert measured[1] == pytest.approx(measured[0], rel=1e-5)


@pytest.mark.slow
def test_a_switch_changes_nothing(nano):
    """torch -> zero3_offload -> torch, an epoch each, which has all sizes, against torch alone."""
    training = nano("sdxl")
    shape = {**image_values("sdxl"), "lr_scheduler_steps": 3 * EPOCH}
    expected = training.run("whole", "torch", 3 * EPOCH, **shape)
    training.run("first", "torch", EPOCH, **shape)
    state = training.export_state("first", EPOCH)
    training.run("second", "zero3_offload", 2 * EPOCH, state=state, num_processes=2, **shape)
    state = training.export_state("second", 2 * EPOCH)
    found = training.run("third", "torch", 3 * EPOCH, state=state, **shape)
    assert found[:EPOCH] == expected[:EPOCH]
    assert deviation(found, expected) <= 1e-5


@pytest.mark.slow
def test_a_kill_changes_no_bit(nano, server):
    """A training that is killed and resumed ends with the weights of one that was left alone."""
    training, until = nano("sd3"), 2 * EPOCH
    shape = {**image_values("sd3"), "save_every": 2, "keep": 2}
    training.phase("whole", "torch", until, **shape)
    counter = KillPoint(server, training.folder)
    process = training.start("whole", kill=counter)
    process.join(120)
    assert process.exitcode == 0
    training.phase("cut", "torch", until, **shape)
    process = training.start(
        "cut", kill=KillPoint(server, training.folder, counter.started * 2 // 3)
    )
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    assert len(progress_folder.saved_steps(training.progress("cut"))) > 0
    assert training.train("cut") == training.losses("whole")
    assert training.hashes("cut", until) == training.hashes("whole", until)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "conditioned"), [("sd3", False), ("flux", True)])
def test_every_family_trains_on_buckets(family, conditioned, nano_inputs, tmp_path, server):
    """Images of three shapes through prepare_dataset, cache_latents and four steps: a batch gives
    the losses of its images one by one; with conditioning images, too."""
    inputs = nano_inputs(family, conditioned=conditioned)
    found = read_cache(inputs / "cache")
    assert {entry.target_size for entry in found.entries} == {(16, 16), (8, 24), (24, 8)}
    for sample in map(found.sample, range(COUNT)):
        others = sample.get("conditioning_latents")
        assert (others is not None) == conditioned
        assert others is None or others.shape[-2:] == sample["latents"].shape[-2:]
    training = Training(tmp_path, inputs, server)
    shape = {**image_values(family), "lr_warmup_steps": 0}
    together = training.run("together", "torch", 4, **shape)
    apart = training.run("apart", "zero3_offload", 4, gradient_accumulation_steps=4, **shape)
    assert apart == pytest.approx(together, rel=1e-4)
