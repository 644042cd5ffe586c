"""The effect of the square crop on images: enlargement, lost area, duplicates, mismatched parts.

It is computed from the sizes, crops and hashes in the dataset's manifest, so the manifest needs no
additional keys, and manifests of earlier versions can be summarised too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isclose

from zerotrain.data.dataset import ConditioningImage, Sample

LEAST_SHARE = 0.005
"""Least share of dropped area that is shown; less would be printed as 0 %."""
SAME_SHAPE = 0.02
"""Relative difference of aspect ratios that scaling to whole pixels can cause."""


@dataclass(frozen=True)
class ImageSummary:
    """The crop and scale of a dataset's images to squares of one resolution."""

    images: int
    resolution: int | None
    """Side of the squares in pixels; None if unknown."""
    enlarged: int
    """Number of images with a shorter side below the resolution."""
    smallest: Sample
    """The image that is enlarged most, or reduced least."""
    dropped: float
    """Share of the area of all images outside the crops, 0 to 1."""
    most_cropped: Sample
    copies: int
    """Number of images with the same bytes as an earlier one."""
    first_copy: tuple[Sample, Sample] | None
    """The first duplicate, and its original."""
    conditioning: int
    """Number of conditioning images of all samples."""
    other_shapes: list[tuple[Sample, ConditioningImage]]
    """Conditioning images with another aspect ratio than their image, with its sample."""


def summarise_images(samples: Sequence[Sample], resolution: int | None) -> ImageSummary:
    """Summarise at least one sample, for squares of `resolution` pixels."""
    first: dict[str, Sample] = {}
    pairs = [
        (sample, original)
        for sample in samples
        if (original := first.setdefault(sample.image_sha256, sample)) is not sample
    ]
    total = sum(width * height for width, height in (s.original_size for s in samples))
    return ImageSummary(
        images=len(samples),
        resolution=resolution,
        enlarged=sum(sample.crop[2] < resolution for sample in samples) if resolution else 0,
        smallest=min(samples, key=lambda sample: sample.crop[2]),
        dropped=1 - sum(sample.crop[2] ** 2 for sample in samples) / total,
        most_cropped=max(samples, key=dropped_share),
        copies=len(pairs),
        first_copy=pairs[0] if pairs else None,
        conditioning=sum(len(sample.conditioning) for sample in samples),
        other_shapes=[
            (sample, image)
            for sample in samples
            for image in sample.conditioning
            if not isclose(_aspect(sample), _aspect(image), rel_tol=SAME_SHAPE)
        ],
    )


def dropped_share(sample: Sample) -> float:
    """Compute the share of an image's area outside its crop, 0 to 1."""
    width, height = sample.original_size
    return 1 - sample.crop[2] ** 2 / (width * height)


def format_summary(summary: ImageSummary) -> list[str]:
    """Describe everything that the user may not expect, one line each."""
    rows = summary_rows(summary)
    return [f"{name}: {value}" for name, value in rows]


def summary_rows(summary: ImageSummary) -> list[tuple[str, str]]:
    """Return the same lines as name and value, for a table."""
    rows = []
    if summary.resolution and summary.enlarged:
        width, height = summary.smallest.original_size
        factor = summary.resolution / summary.smallest.crop[2]
        rows.append(
            (
                "enlarged images",
                f"{summary.enlarged} of {summary.images} are smaller than "
                f"{summary.resolution} px and are enlarged, up to {factor:.1f} times "
                f"({summary.smallest.file}, {width}x{height})",
            )
        )
    worst = dropped_share(summary.most_cropped)
    if max(summary.dropped, worst) >= LEAST_SHARE:
        rows.append(
            (
                "square crop",
                f"drops {summary.dropped:.0%} of all image area, most of "
                f"{summary.most_cropped.file} ({worst:.0%})",
            )
        )
    if summary.first_copy:
        copy, original = summary.first_copy
        rows.append(
            (
                "duplicate images",
                f"{summary.copies} of {summary.images} have the same bytes as an earlier one "
                f"({copy.file} = {original.file})",
            )
        )
    if summary.other_shapes:
        sample, image = summary.other_shapes[0]
        (width, height), (others, high) = sample.original_size, image.original_size
        rows.append(
            (
                "conditioning images",
                f"{len(summary.other_shapes)} of {summary.conditioning} have another aspect ratio "
                f"than their image, so their squares show other parts ({image.file} "
                f"{others}x{high}, {sample.file} {width}x{height})",
            )
        )
    return rows


def _aspect(image: Sample | ConditioningImage) -> float:
    width, height = image.original_size
    return width / height
