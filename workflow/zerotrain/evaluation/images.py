"""What the weights of a phase make of prompts: a grid of images, and how well they fit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from zerotrain.cache import Cache, read_cache
from zerotrain.config import RunConfig
from zerotrain.data.crop import crop_and_resize
from zerotrain.data.dataset import Dataset, read_dataset
from zerotrain.data.source import open_source
from zerotrain.errors import PipelineError
from zerotrain.evaluation.grid import draw_grid
from zerotrain.evaluation.holdout_loss import HeldOutImages, conditions, holdout_loss
from zerotrain.evaluation.measured import Measured
from zerotrain.families import load_family
from zerotrain.judge import Judge
from zerotrain.training.draws import IMAGE_SEEDS, generator

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_PROMPTS = 10
"""Captions that become prompts where the configuration names none."""


def measure_images(
    config: RunConfig, phase: str, dataset: Path, cache: Path, weights: Path, device: str
) -> Measured:
    """Sample a grid; measure prompt accuracy by the judge and loss on held-out samples.

    Args:
        config: The run's configuration.
        phase: The phase's name.
        dataset: Folder of the dataset.
        cache: Folder of the phase's cache.
        weights: Folder of the phase's weights.
        device: The device to compute on.

    Raises:
        PipelineError: the judge has no image or knows none of the prompts.
    """
    samples = read_dataset(dataset)
    prompts = config.evaluate.prompts or _captions(samples)[:MOST_PROMPTS]
    _check_judge(config, samples, prompts)
    rows = _sample(config, phase, prompts, weights, device)

    def write(folder: Path) -> None:
        draw_grid(prompts, rows).save(folder / "grid.png")
        (folder / "samples").mkdir()
        for number, row in enumerate(rows):
            for column, image in enumerate(row):
                image.save(folder / "samples" / f"{number:02d}-{column:02d}.png")

    metrics = {
        **_judge(config, phase, samples, prompts, rows),
        "val_loss": _holdout_loss(config, phase, cache, weights, device),
    }
    return Measured(metrics, prompts, "grid.png", write)


def _captions(dataset: Dataset) -> list[str]:
    """Distinct captions in the dataset's order."""
    return list(dict.fromkeys(sample.caption for sample in dataset.samples))


def _check_judge(config: RunConfig, dataset: Dataset, prompts: list[str]) -> None:
    """Refuse, before any image is made, what the judge could not judge."""
    if config.evaluate.judge == "none":
        return
    known = {sample.caption for sample in dataset.split("holdout")}
    if not known:
        raise PipelineError(
            f"evaluate.judge: {config.evaluate.judge} learns from held-out images, and "
            f"data.holdout: {config.data.holdout:g} keeps no image",
            hint="raise data.holdout, or set evaluate.judge to none",
        )
    if not known.intersection(prompts):
        raise PipelineError(
            f"evaluate.judge: none of the prompts is a held-out caption: {'; '.join(prompts[:3])}",
            hint="set evaluate.prompts to captions of the dataset, or evaluate.judge to none",
        )


def _sample(
    config: RunConfig, phase: str, prompts: list[str], weights: Path, device: str
) -> list[list[Image]]:
    """A row of images for each prompt. Seeds are the same for every phase, so rows compare."""
    count = config.evaluate.images_per_prompt
    places = [(number, column) for number in range(len(prompts)) for column in range(count)]
    family = load_family(config.family)
    assert family.modality == "image"
    images = family.sample(
        weights,
        [prompts[number] for number, _ in places],
        [int(generator(config.seed, IMAGE_SEEDS, *place).integers(2**63)) for place in places],
        config.evaluate,
        resolution=config.phase(phase).train.resolution,
        device=device,
        max_sequence_length=config.cache.max_sequence_length,
    )
    return [images[start : start + count] for start in range(0, len(images), count)]


def _judge(
    config: RunConfig, phase: str, dataset: Dataset, prompts: list[str], rows: list[list[Image]]
) -> dict[str, float]:
    """Accuracy of the samples by a judge of the held-out images, and its own on the others."""
    if config.evaluate.judge == "none":
        return {}
    resolution = config.phase(phase).train.resolution
    source = open_source(config.data)

    def crops(split: Literal["train", "holdout"]) -> Iterator[Image]:
        for sample in dataset.split(split):
            image = source.image_of(sample.file, sample.image_sha256)
            yield crop_and_resize(image, sample.crop, resolution)

    def captions(split: Literal["train", "holdout"]) -> list[str]:
        return [sample.caption for sample in dataset.split(split)]

    judge = Judge(crops("holdout"), captions("holdout"))
    known = [(p, image) for p, row in zip(prompts, rows, strict=True) for image in row]
    known = [(prompt, image) for prompt, image in known if prompt in judge.captions]
    return {
        "prompt_accuracy": judge.accuracy([image for _, image in known], [p for p, _ in known]),
        "judge_accuracy": judge.accuracy(crops("train"), captions("train")),
    }


def _holdout_loss(
    config: RunConfig, phase: str, cache: Path, weights: Path, device: str
) -> float | None:
    """The loss, or None if the dataset holds nothing out."""
    opened = read_cache(cache, verify=False)
    assert isinstance(opened, Cache)
    held_out = HeldOutImages(opened, config.seed)
    if not len(held_out):
        return None
    from zerotrain.families.placement import place_model, sampling_dtype

    family = load_family(config.family)
    assert family.modality == "image"
    given = config.phase(phase).train.objective(config.family)
    return holdout_loss(
        place_model(family.load_trained(weights, sampling_dtype(device)), device),
        family.objective(weights, conditions(given)),
        held_out,
        torch.device(device),
        config.evaluate.batch_size,
    )
