"""A dataset of images: every sample with its hashes, crop and split.

It names no path outside the dataset: the image folder comes from the configuration, and
readers compare each image's hash with the manifest (as Source.image_of does).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from zerotrain import artifact
from zerotrain.artifact.manifest import DATASET
from zerotrain.data.dataset_folder import PublishedDataset, SampleType, read_repeats, read_samples
from zerotrain.data.source import count_epoch

KIND = DATASET


@dataclass(frozen=True)
class ConditioningImage:
    """An image that the model reads in addition to a sample's caption."""

    file: str
    """Name within the source for its position (Source.conditioning_source)."""
    image_sha256: str
    original_size: tuple[int, int]
    """Width and height of the image in pixels, upright."""
    crop: tuple[int, int, int]
    """Left, top and side of the centre square, in pixels of the original."""


@dataclass(frozen=True)
class Sample:
    """One image with its caption."""

    file: str
    """Name within the source, with forward slashes."""
    image_sha256: str
    caption: str
    caption_sha256: str
    original_size: tuple[int, int]
    """Width and height of the image in pixels, upright."""
    size: tuple[int, int]
    """Width and height after data.max_pixels, with the aspect ratio kept."""
    crop: tuple[int, int, int]
    """Left, top and side of the centre square, in pixels of the original."""
    split: Literal["train", "holdout"]
    conditioning: tuple[ConditioningImage, ...] = ()
    """In the order in which the model reads them; every sample has the same number."""
    source: str = ""
    """Name of its source, of several (data.sources)."""
    repeats: int = 1
    """How often an epoch has it, times the dataset's repeats."""
    share: float = 1.0
    """How often on average, if that is no whole number: of all such images an epoch has a part."""
    is_regularisation_data: bool = False
    other_captions: tuple[str, ...] = ()
    """More captions of a training image: each turn draws one of all."""
    loss_weight: float = 1.0
    """Factor of its loss in training."""
    background: str | None = None
    """The colour behind its transparent pixels, if it has some and the colour is not white."""
    mask: str | None = None
    """Its loss mask, named within Source.mask_source; None if it is the image's alpha channel."""
    mask_sha256: str | None = None
    """Digest of the file with its loss mask; None if it has none."""

    @property
    def captions(self) -> tuple[str, ...]:
        """Return all captions, of which each turn draws one."""
        return (self.caption, *self.other_captions)


class Dataset(PublishedDataset[Sample]):
    """A published dataset of images."""

    @property
    def epoch_size(self) -> int:
        """Return the number of samples in an epoch: the train split with its repeats."""
        train = self.samples.places("split", "train")
        repeats, shares = (self.samples.numbers(name)[train] for name in ("repeats", "share"))
        return count_epoch(repeats, shares, self.repeats)

    @property
    def conditioning_images(self) -> int:
        """Return the number of conditioning images per sample."""
        return len(self.samples[0].conditioning) if self.samples else 0


def caption_sha256(caption: str) -> str:
    """Compute the sha256 of a caption's UTF-8 bytes."""
    return hashlib.sha256(caption.encode()).hexdigest()


def choose_split(image_sha256: str, holdout: float) -> Literal["train", "holdout"]:
    """Choose the split of an image by its content alone.

    Adding, removing or renaming other images does not change it, and equal images are in the same
    split.
    """
    drawn = hashlib.sha256(f"holdout {image_sha256}".encode()).digest()
    return "holdout" if int.from_bytes(drawn[:8]) < holdout * 2**64 else "train"


def read_dataset(folder: Path, *, verify: bool = True) -> Dataset:
    """Read a dataset of images.

    Args:
        folder: The dataset.
        verify: Whether to hash its files; otherwise only presence and sizes are compared.

    Raises:
        PipelineError: it is missing or damaged, or of another kind or format.
    """
    found = artifact.read(folder, KIND, verify=verify)
    samples = read_samples(found, IMAGES)
    if verify:
        samples.check()
    return Dataset(found, samples, read_repeats(found))


def _entry(sample: Sample) -> dict[str, Any]:
    return {**vars(sample), "conditioning": [*map(vars, sample.conditioning)]}


IMAGES = SampleType(Sample, _entry)
