"""Evaluation of an image model's weights: a grid of samples, prompt accuracy and held-out loss."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL.Image import Resampling

from zerotrain.artifact.tensor_file import FLOAT_TYPES
from zerotrain.cache.reader import Cache, read_cache
from zerotrain.config.stage_settings import EvaluateSettings
from zerotrain.data.buckets import centre_crop, crop_and_resize
from zerotrain.data.conditioning import read_conditioning_images
from zerotrain.data.dataset import Dataset, read_dataset
from zerotrain.data.draws import IMAGE_SEEDS, generator
from zerotrain.data.open import open_source
from zerotrain.data.sheets import draw_grid
from zerotrain.errors import PipelineError
from zerotrain.evaluation.results import Measured, spread
from zerotrain.machine.regular_file import open_new
from zerotrain.models.families import load_family
from zerotrain.models.families.conditioning import check_sampling
from zerotrain.state.open import PerLayerView
from zerotrain.state.position import MASTER, Source
from zerotrain.training.reporting.holdout_loss import HeldOutImages, conditions, holdout_loss

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_PROMPTS = 10
"""Maximum of captions that are used as prompts if the configuration names none."""
ADAPTER = re.compile(r"\.default(_0)?(?=\.|$)")
"""The name of an adapter in those of its parameters: peft's, and that of diffusers' loader."""


@dataclass(frozen=True)
class Companion:
    """Weights of which a grid is made with the prompts and seeds of a phase's own."""

    file: str
    """Name of the grid's file."""
    weights: Path
    """Their folder."""
    values: Source | None = None
    """The training whose weights replace the trained ones of the folder; None for none."""
    dtype: str = "fp32"
    """Type that these are rounded to, a key of FLOAT_TYPES: that of the folder."""


def measure_images(
    settings: EvaluateSettings,
    dataset: Path,
    cache: Path,
    weights: Path,
    device: str,
    companions: Sequence[Companion] = (),
) -> Measured:
    """Sample a grid, and measure prompt accuracy by the judge and loss on held-out samples.

    Args:
        settings: The settings of evaluate.
        dataset: Folder of the dataset.
        cache: Folder of the phase's cache.
        weights: Folder of the phase's weights.
        device: The device to compute on.
        companions: Weights of which the square grid alone is made as well.

    Raises:
        PipelineError: the judge has no image or knows none of the prompts, or a conditioning
            image cannot be read.
    """
    samples = read_dataset(dataset)
    prompts, conditioning = _prompts(settings, samples, weights)
    _check_judge(settings, samples, prompts)
    resolution = settings.train.resolution
    rows = _sample(settings, prompts, conditioning, weights, device, resolution)
    others = {
        f"{size[0]}x{size[1]}": _sample(settings, prompts, None, weights, device, size)
        for size in settings.evaluate.sizes or ()
    }
    compared = {
        one.file: _sample(settings, prompts, conditioning, one.weights, device, resolution, one)
        for one in companions
    }
    given = [
        [crop_and_resize(image, centre_crop(image.size), resolution) for image in images]
        for images in conditioning or ()
    ]

    def write(folder: Path) -> None:
        _save_png(draw_grid(prompts, rows, given or None), folder / "grid.png")
        for files, images in zip(_names(given), given, strict=True):
            for file, image in zip(files, images, strict=True):
                (folder / file).parent.mkdir(exist_ok=True)
                _save_png(image, folder / file)
        _save(rows, folder / "samples")
        for file, more in compared.items():
            _save_png(draw_grid(prompts, more, given or None), folder / file)
        for size, more in others.items():
            _save_png(draw_grid(prompts, more), folder / f"grid-{size}.png")
            _save(more, folder / f"samples-{size}")

    metrics = {
        **_judge(settings, samples, prompts, rows),
        "val_loss": _holdout_loss(settings, cache, weights, device),
    }
    return Measured(metrics, prompts, "grid.png", write, conditioning_images=_names(given))


def _save_png(image: Image, path: Path) -> None:
    with open_new(path) as stream:
        image.save(stream, format="PNG")


def _save(rows: list[list[Image]], folder: Path) -> None:
    folder.mkdir()
    for number, row in enumerate(rows):
        for column, image in enumerate(row):
            _save_png(image, folder / f"{number:02d}-{column:02d}.png")


def _prompts(
    settings: EvaluateSettings, dataset: Dataset, weights: Path
) -> tuple[list[str], list[list[Image]] | None]:
    """Return the prompts and the conditioning images of each, or None for no images."""
    evaluate, images = settings.evaluate, settings.evaluate.conditioning_images
    if images is not None:
        key = "evaluate.conditioning_images"
        for files in images:
            check_sampling(weights, len(files), key)
        return evaluate.prompts, [read_conditioning_images(files, key) for files in images]
    if not dataset.conditioning_images:
        captions = list(dict.fromkeys(sample.caption for sample in dataset.samples))
        return evaluate.prompts or spread(captions, MOST_PROMPTS), None
    # Edits of many images share a caption, so samples also differ by their conditioning images.
    distinct = {(sample.caption, sample.conditioning): sample for sample in dataset.samples}
    chosen, source = spread([*distinct.values()], MOST_PROMPTS), open_source(settings.data)
    return [sample.caption for sample in chosen], [
        [
            source.conditioning_source(position).image_of(image.file, image.image_sha256)
            for position, image in enumerate(sample.conditioning)
        ]
        for sample in chosen
    ]


def _names(conditioning: list[list[Image]]) -> list[list[str]]:
    """Return the files for each prompt's conditioning images in the evaluation's folder."""
    return [
        [f"conditioning/{number:02d}-{place:02d}.png" for place in range(len(images))]
        for number, images in enumerate(conditioning)
    ]


def _check_judge(settings: EvaluateSettings, dataset: Dataset, prompts: list[str]) -> None:
    """Reject, before any image is sampled, prompts that the judge cannot judge."""
    if settings.evaluate.judge == "none":
        return
    known = {sample.caption for sample in dataset.split("holdout")}
    if not known:
        raise PipelineError(
            f"evaluate.judge: {settings.evaluate.judge} learns from held-out images, and "
            f"data.holdout: {settings.data.holdout:g} keeps no image",
            hint="raise data.holdout, or set evaluate.judge to none",
        )
    if not known.intersection(prompts):
        raise PipelineError(
            f"evaluate.judge: none of the prompts is a held-out caption: {'; '.join(prompts[:3])}",
            hint="set evaluate.prompts to captions of the dataset, or evaluate.judge to none",
        )


def _sample(
    settings: EvaluateSettings,
    prompts: list[str],
    conditioning: list[list[Image]] | None,
    weights: Path,
    device: str,
    resolution: int | tuple[int, int],
    companion: Companion | None = None,
) -> list[list[Image]]:
    """Sample a row of images for each prompt, with the same seeds in every phase.

    The resolution is the side of squares, or width and height.
    """
    count = settings.evaluate.images_per_prompt
    places = [(number, column) for number in range(len(prompts)) for column in range(count)]
    from zerotrain.models.families.pipelines import place_pipeline  # slow to import

    family = load_family(settings.family)
    assert family.modality == "image"
    pipeline = family.load_pipeline(weights, device)
    if companion and companion.values:
        put_values(getattr(pipeline, family.trained_part), companion.values, companion.dtype)
    images = family.draw(
        place_pipeline(pipeline, device),
        [prompts[number] for number, _ in places],
        [int(generator(settings.seed, IMAGE_SEEDS, *place).integers(2**63)) for place in places],
        settings.evaluate,
        resolution=resolution,
        max_sequence_length=settings.max_sequence_length,
        long_captions=settings.long_captions,
        conditioning=conditioning and [conditioning[number] for number, _ in places],
    )
    return [images[start : start + count] for start in range(0, len(images), count)]


def put_values(model: torch.nn.Module, trained: Source, dtype: str) -> None:
    """Put a training's weights in place of those that a model, or its adapter, was exported with.

    Args:
        model: The trained part of a pipeline that was loaded from the export.
        trained: The training.
        dtype: Type of the export, a key of FLOAT_TYPES, to which they are rounded first.
    """
    own = {ADAPTER.sub("", name): parameter for name, parameter in model.named_parameters()}
    layers = PerLayerView(trained)  # as exported
    with torch.no_grad():
        for name in layers.names:
            value = layers.tensor(name, MASTER).to(FLOAT_TYPES[dtype])
            own[ADAPTER.sub("", name)].copy_(value)


def _judge(
    settings: EvaluateSettings, dataset: Dataset, prompts: list[str], rows: list[list[Image]]
) -> dict[str, float]:
    """Return the samples' accuracy by a judge fitted on held-out images, and the judge's own."""
    if settings.evaluate.judge == "none":
        return {}
    resolution = settings.train.resolution
    source = open_source(settings.data)

    def crops(split: Literal["train", "holdout"]) -> Iterator[Image]:
        for sample in dataset.split(split):
            image = source.image_of(sample.file, sample.image_sha256, sample.background)
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
    settings: EvaluateSettings, cache: Path, weights: Path, device: str
) -> float | None:
    """Return the loss, or None if the dataset holds nothing out."""
    opened = read_cache(cache, verify=False)
    assert isinstance(opened, Cache)
    held_out = HeldOutImages(opened, settings.seed)
    if not len(held_out):
        return None
    from zerotrain.models.families.pipelines import place_model, sampling_dtype

    family = load_family(settings.family)
    assert family.modality == "image"
    given = settings.train.objective(settings.family)
    return holdout_loss(
        place_model(family.load_trained(weights, sampling_dtype(device)), device),
        family.objective(weights, conditions(given)),
        held_out,
        torch.device(device),
        held_out.batches(settings.evaluate.batch_size),
    )


SIDE = 16
NEIGHBOURS = 3


class Judge:
    """A classifier of images by caption: the nearest neighbours vote, weighted by distance.

    It is fitted on the held-out images, which training never sees, and sees only pixels: grey,
    scaled to 16 x 16, brightness in [0, 1]. Its own accuracy is measured on the images of the train
    split.
    """

    def __init__(self, images: Iterable[Image], captions: Sequence[str]) -> None:
        from sklearn.neighbors import KNeighborsClassifier

        neighbours = min(NEIGHBOURS, len(captions))
        self._classifier = KNeighborsClassifier(neighbours, weights="distance")
        self._classifier.fit(pixel_vectors(images), list(captions))

    @property
    def captions(self) -> list[str]:
        """The captions that it distinguishes, sorted."""
        return [str(caption) for caption in self._classifier.classes_]

    def accuracy(self, images: Iterable[Image], captions: Sequence[str]) -> float:
        """Return the share of the images to which it assigns their caption."""
        found = self._classifier.predict(pixel_vectors(images))
        return float(np.mean(found == np.asarray(captions)))


def pixel_vectors(images: Iterable[Image]) -> NDArray[np.float32]:
    """Return grey pixels of images scaled to SIDE x SIDE (box filter), float32 [N, SIDE * SIDE]."""
    small = [image.convert("L").resize((SIDE, SIDE), Resampling.BOX) for image in images]
    return np.stack([np.asarray(image, dtype=np.float32).ravel() / 255 for image in small])
