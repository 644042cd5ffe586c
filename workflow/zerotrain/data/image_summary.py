"""The effect of cropping on images: buckets, enlargement, lost area, duplicates, mismatched parts.

It is computed from the sizes, crops and hashes in the dataset's manifest, so the manifest needs no
additional keys.

The perceptual hash is pHash: the signs of the lowest 8x8 frequencies of the grey image, compared
with their median (Zauner, "Implementation and Benchmarking of Perceptual Image Hash Functions",
2010), as the library ImageHash computes it. Two images look alike if at most DISTANCE of its 64
bits differ.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isclose
from typing import TYPE_CHECKING

from zerotrain.data.buckets import Size, View, choose_source_views
from zerotrain.data.dataset import ConditioningImage, Sample

if TYPE_CHECKING:
    from PIL.Image import Image

    from zerotrain.config.data import BucketConfig

LEAST_SHARE = 0.005
"""Least share of dropped area that is shown; less would be printed as 0 %."""
SAME_SHAPE = 0.02
"""Relative difference of aspect ratios that scaling to whole pixels can cause."""


SHOWN = 5
"""Buckets that are listed."""
ASPECTS = (
    ("below 1:2", 1 / 2),
    ("1:2 to 2:3", 2 / 3),
    ("2:3 to 4:5", 4 / 5),
    ("4:5 to 5:4", 5 / 4),
    ("5:4 to 3:2", 3 / 2),
    ("3:2 to 2:1", 2 / 1),
    ("2:1 and above", inf),
)
"""Classes of width by height, each with its upper end, which belongs to the next class."""


@dataclass(frozen=True)
class ImageSummary:
    """The crop and scale of a dataset's images at one resolution."""

    images: int
    resolution: int | None
    """Side of squares in pixels; None if unknown."""
    buckets: Counter[Size] | None
    """Number of images by width and height; None for squares."""
    enlarged: int
    """Number of images that are scaled up."""
    smallest: tuple[Sample, View]
    """The image that is enlarged most, or reduced least."""
    dropped: float
    """Share of the area of all images outside the crops, 0 to 1."""
    most_cropped: tuple[Sample, View]
    stretched: int
    """Number of images whose width and height are scaled by other factors."""
    most_stretched: tuple[Sample, View]
    copies: int
    """Number of images with the same bytes as an earlier one."""
    first_copy: tuple[Sample, Sample] | None
    """The first duplicate, and its original."""
    conditioning: int
    """Number of conditioning images of all samples."""
    other_shapes: list[tuple[Sample, ConditioningImage]]
    """Conditioning images with another aspect ratio than their image, with its sample."""


def summarise_images(
    samples: Sequence[Sample],
    resolution: int | None,
    buckets: BucketConfig | None = None,
    own: Mapping[str, int] | None = None,
) -> ImageSummary:
    """Summarise at least one sample, for squares of `resolution` pixels or for buckets.

    `own` has the resolutions of sources that have one, by name.
    """
    first: dict[str, Sample] = {}
    pairs = [
        (sample, original)
        for sample in samples
        if (original := first.setdefault(sample.image_sha256, sample)) is not sample
    ]
    own = own or {}
    views = choose_source_views(samples, resolution or 1, buckets if resolution else None, own)
    seen = [*zip(samples, views, strict=True)]
    total = sum(width * height for width, height in (s.original_size for s in samples))
    return ImageSummary(
        images=len(samples),
        resolution=resolution,
        buckets=Counter(view.size for view in views) if (buckets or own) and resolution else None,
        enlarged=sum(view.scale > 1 for view in views) if resolution else 0,
        smallest=max(seen, key=lambda one: one[1].scale),
        dropped=1 - sum(view.box[2] * view.box[3] for view in views) / total,
        most_cropped=max(seen, key=_dropped_share),
        stretched=sum(view.stretch > 1 + SAME_SHAPE for view in views),
        most_stretched=max(seen, key=lambda one: one[1].stretch),
        copies=len(pairs),
        first_copy=pairs[0] if pairs else None,
        conditioning=sum(len(sample.conditioning) for sample in samples),
        other_shapes=[
            (sample, image)
            for sample in samples
            for image in sample.conditioning
            if not is_same_shape(sample.original_size, image.original_size)
        ],
    )


@dataclass(frozen=True)
class BucketUse:
    """The images of one size, and what their crops lose."""

    size: Size
    images: int
    enlarged: int
    """Number of images that are scaled up."""
    dropped: float
    """Share of the area of its images outside their crops, 0 to 1."""


def bucket_uses(samples: Sequence[Sample], views: Sequence[View]) -> list[BucketUse]:
    """Return the use of each size, the most used first."""
    found: dict[Size, list[tuple[Sample, View]]] = {}
    for sample, view in zip(samples, views, strict=True):
        found.setdefault(view.size, []).append((sample, view))
    uses = [
        BucketUse(
            size=size,
            images=len(members),
            enlarged=sum(view.scale > 1 for _, view in members),
            dropped=1
            - sum(view.box[2] * view.box[3] for _, view in members)
            / sum(sample.original_size[0] * sample.original_size[1] for sample, _ in members),
        )
        for size, members in found.items()
    ]
    return sorted(uses, key=lambda use: (-use.images, use.size))


def count_aspects(samples: Sequence[Sample]) -> list[tuple[str, int]]:
    """Count the images of each class of ASPECTS."""
    counts = Counter(
        next(name for name, end in ASPECTS if _aspect(sample) < end) for sample in samples
    )
    return [(name, counts[name]) for name, _ in ASPECTS]


def _dropped_share(one: tuple[Sample, View]) -> float:
    return one[1].dropped(one[0].original_size)


def format_summary(summary: ImageSummary) -> list[str]:
    """Describe everything that the user may not expect, one line each."""
    rows = summary_rows(summary)
    return [f"{name}: {value}" for name, value in rows]


def summary_rows(summary: ImageSummary) -> list[tuple[str, str]]:
    """Return the same lines as name and value, for a table."""
    rows = []
    if summary.buckets:
        rows.append(("aspect buckets", _format_buckets(summary.buckets)))
    if summary.resolution and summary.enlarged:
        sample, view = summary.smallest
        width, height = sample.original_size
        least = "their bucket" if summary.buckets else f"{summary.resolution} px"
        rows.append(
            (
                "enlarged images",
                f"{summary.enlarged} of {summary.images} are smaller than {least} and are "
                f"enlarged, up to {view.scale:.1f} times ({sample.file}, {width}x{height})",
            )
        )
    if summary.stretched:
        sample, view = summary.most_stretched
        rows.append(
            (
                "stretched images",
                f"{summary.stretched} of {summary.images}, up to {view.stretch:.2f} times "
                f"({sample.file}), by crop: none",
            )
        )
    worst = _dropped_share(summary.most_cropped)
    if max(summary.dropped, worst) >= LEAST_SHARE:
        rows.append(
            (
                "crop" if summary.buckets else "square crop",
                f"drops {summary.dropped:.0%} of all image area, most of "
                f"{summary.most_cropped[0].file} ({worst:.0%})",
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


def is_same_shape(one: Size, other: Size) -> bool:
    """Return whether two sizes have the same aspect ratio, up to SAME_SHAPE."""
    return isclose(one[0] / one[1], other[0] / other[1], rel_tol=SAME_SHAPE)


def _aspect(sample: Sample) -> float:
    width, height = sample.original_size
    return width / height


def _format_buckets(buckets: Counter[Size]) -> str:
    shown = [f"{w}x{h} ({count})" for (w, h), count in buckets.most_common(SHOWN)]
    if (more := len(buckets) - SHOWN) > 0:
        (width, height), least = buckets.most_common()[-1]
        shown.append(f"and {more} more, the smallest {width}x{height} ({least})")
    return f"{len(buckets)} sizes, images of each: {', '.join(shown)}"


BITS = 64
DISTANCE = 4
"""Differing bits up to which two images look alike. Of 130 photographs and parts of photographs,
every one enlarged or reduced by half was found, 98 % of those saved as JPEG of quality 30, and 87 %
of those with 1 % cut from each side; of 8,385 pairs of other pictures only a stereo pair."""


@dataclass(frozen=True)
class NearGroup:
    """Images that look like the first of them."""

    files: tuple[str, ...]
    distances: tuple[int, ...]
    """Bits that differ from the first, of each file; 0 for the first."""


def perceptual_hash(image: Image) -> int:
    """Compute the pHash of an image, 64 bits."""
    from imagehash import phash

    return int(str(phash(image)), 16)


def equal_groups(keys: Iterable[tuple[str, Hashable]]) -> list[list[str]]:
    """Group the names whose keys are equal, in order; names without an equal are omitted."""
    groups: defaultdict[Hashable, list[str]] = defaultdict(list)
    for name, key in keys:
        groups[key].append(name)
    return [group for group in groups.values() if len(group) > 1]


def near_groups(hashes: Mapping[str, int]) -> list[NearGroup]:
    """Group files whose hashes differ in at most DISTANCE bits from the group's first file.

    Each file joins the nearest first file before it, of several the earliest, so that no chain of
    small differences joins unlike images. Hashes that differ in so few bits are equal in one of
    DISTANCE + 1 parts: only files with an equal part are compared, so that the cost is nearly
    linear.
    """
    shifts = _part_shifts(DISTANCE + 1)
    with_part: list[dict[int, list[int]]] = [defaultdict(list) for _ in shifts]
    groups: list[list[tuple[str, int]]] = []
    for file, found in hashes.items():
        parts = [found >> shift & mask for shift, mask in shifts]
        places = {
            place
            for known, part in zip(with_part, parts, strict=True)
            for place in known.get(part, ())
        }
        bits, place = min(
            (((found ^ hashes[groups[place][0][0]]).bit_count(), place) for place in places),
            default=(BITS, 0),
        )
        if bits <= DISTANCE:
            groups[place].append((file, bits))
            continue
        for known, part in zip(with_part, parts, strict=True):
            known[part].append(len(groups))
        groups.append([(file, 0)])
    return [
        NearGroup(tuple(file for file, _ in group), tuple(bits for _, bits in group))
        for group in groups
        if len(group) > 1
    ]


def _part_shifts(count: int) -> Sequence[tuple[int, int]]:
    """Return the position and mask of each of `count` parts of a hash."""
    ends = [BITS * place // count for place in range(count + 1)]
    return [(start, (1 << (end - start)) - 1) for start, end in pairwise(ends)]
