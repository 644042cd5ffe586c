"""The dataset manifest: every sample with its hashes, crop and split. It is the artifact's content.

The content names no path outside the dataset: the image folder comes from the configuration, and
whoever opens an image compares its hash with the manifest's (Source.image_of does).
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from zerotrain import artifact
from zerotrain.artifact import Artifact

KIND = "dataset"


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
    """Width and height after data.max_pixels, aspect kept."""
    crop: tuple[int, int, int]
    """Left, top and side of the centre square, in pixels of the original."""
    split: Literal["train", "holdout"]


@dataclass(frozen=True)
class Dataset:
    """A published dataset manifest."""

    artifact: Artifact
    samples: tuple[Sample, ...]
    """In the order of their file names."""
    repeats: int

    def split(self, name: Literal["train", "holdout"]) -> tuple[Sample, ...]:
        """The samples of one split, in order."""
        return tuple(sample for sample in self.samples if sample.split == name)

    @property
    def epoch_size(self) -> int:
        """Samples in an epoch: the train split, times repeats."""
        return len(self.split("train")) * self.repeats


def caption_sha256(caption: str) -> str:
    """Sha256 of a caption's UTF-8 bytes."""
    return hashlib.sha256(caption.encode()).hexdigest()


def choose_split(image_sha256: str, holdout: float) -> Literal["train", "holdout"]:
    """Which split an image belongs to, by its content alone.

    Adding, removing or renaming other images moves none, and equal images fall on the same side.
    """
    drawn = hashlib.sha256(f"holdout {image_sha256}".encode()).digest()
    return "holdout" if int.from_bytes(drawn[:8]) < holdout * 2**64 else "train"


def dataset_content(
    samples: list[Sample], *, repeats: int, bad: list[dict[str, str]]
) -> dict[str, Any]:
    """The manifest's content; `bad` lists refused files with `file` and `reason`."""
    train = sum(sample.split == "train" for sample in samples)
    return {
        "samples": [asdict(sample) for sample in samples],
        "repeats": repeats,
        "bad": bad,
        "count": {"train": train, "holdout": len(samples) - train, "bad": len(bad)},
    }


def read_dataset(folder: Path) -> Dataset:
    """Read a dataset's manifest.

    Raises:
        PipelineError: if there is none, or it is of another kind or format.
    """
    found = artifact.read(folder, KIND)
    samples = tuple(
        Sample(
            **{
                **entry,
                "original_size": tuple(entry["original_size"]),
                "size": tuple(entry["size"]),
                "crop": tuple(entry["crop"]),
            }
        )
        for entry in found.content["samples"]
    )
    return Dataset(found, samples, found.content["repeats"])
