"""Aspect buckets: the sizes that images of other shapes than a square are trained at.

As in NovelAI's "Improvements on Stable Diffusion" (2022) and kohya's scripts: sizes of different
shapes with at most as many pixels as the square, each image in the one of the nearest shape. The
part of an image that is trained depends on its size and content alone, so adding or removing other
images changes it only where `merge_below` dissolves a bucket.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import log, sqrt
from typing import TYPE_CHECKING

from zerotrain.data.draws import CROP, generator

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

    from zerotrain.config.data import BucketConfig
    from zerotrain.data.dataset import Sample

Size = tuple[int, int]
"""Width and height in pixels."""


@dataclass(frozen=True)
class View:
    """The part of an image that is trained, and the size that it is scaled to."""

    box: tuple[int, int, int, int]
    """Left, top, width and height in pixels of the original."""
    size: Size

    @property
    def is_square(self) -> bool:
        """Return whether it is a square of the original, scaled to a square."""
        return self.box[2] == self.box[3] and self.size[0] == self.size[1]

    @property
    def crop_top_left(self) -> tuple[int, int]:
        """Return top and left in pixels of the scaled original, as SDXL's conditions have them."""
        left, top, width, height = self.box
        return round(top * self.size[1] / height), round(left * self.size[0] / width)

    @property
    def stretch(self) -> float:
        """Return the ratio of the factors of width and height, at least 1."""
        across, down = self.size[0] / self.box[2], self.size[1] / self.box[3]
        return max(across, down) / min(across, down)

    @property
    def scale(self) -> float:
        """Return how often the box is enlarged: the larger factor of width and height."""
        return max(self.size[0] / self.box[2], self.size[1] / self.box[3])

    def dropped(self, original: Size) -> float:
        """Return the share of the original's area outside the box, 0 to 1."""
        return 1 - self.box[2] * self.box[3] / (original[0] * original[1])

    def of_other(self, original: Size, other: Size) -> View:
        """Return the same part of another image, scaled to the same size.

        Args:
            original: Width and height of this view's image.
            other: Width and height of the other one, of the same shape up to rounding.
        """
        left, top, width, height = self.box
        (across, down), (wide, high) = original, other
        x, y = min(wide - 1, round(left * wide / across)), min(high - 1, round(top * high / down))
        own = max(1, round((left + width) * wide / across) - x)
        tall = max(1, round((top + height) * high / down) - y)
        return View((x, y, own, tall), self.size)

    def cut(self, image: Image) -> Image:
        """Cut the box out of an image and scale it, as crop_and_resize does with squares."""
        from PIL.Image import Resampling

        left, top, width, height = self.box
        if self.is_square:
            return crop_and_resize(image, (left, top, width), self.size[0])
        box = (left, top, left + width, top + height)
        if (width, height) == self.size:
            return image.crop(box)
        return image.resize(self.size, Resampling.LANCZOS, box=box)


def square_view(crop: tuple[int, int, int], side: int) -> View:
    """Return the view of a square (left, top, side of the original), scaled to `side`."""
    left, top, own = crop
    return View((left, top, own, own), (side, side))


def choose_views(samples: Sequence[Sample], side: int, buckets: BucketConfig | None) -> list[View]:
    """Choose the view of each sample: its centre square, or that of its bucket.

    Args:
        samples: The samples of a dataset.
        side: Side of the square in pixels; a bucket has at most as many pixels.
        buckets: The section `data.aspect_buckets`; None for squares.
    """
    if buckets is None:
        return [square_view(sample.crop, side) for sample in samples]
    sizes = [choose_bucket(sample.original_size, side, buckets) for sample in samples]
    if buckets.merge_below:
        counts = Counter(
            size for size, one in zip(sizes, samples, strict=True) if one.split == "train"
        )
        moved = merge_small(counts, buckets.merge_below)
        # A size without training images has no bucket to be learned in.
        sizes = [moved.get(size) or _nearest(size, set(moved.values())) for size in sizes]
    return [
        View(_box(sample.original_size, size, sample.image_sha256, buckets.crop), size)
        for sample, size in zip(samples, sizes, strict=True)
    ]


@lru_cache(maxsize=2**16)
def choose_bucket(original: Size, side: int, buckets: BucketConfig) -> Size:
    """Choose the bucket with the nearest aspect ratio for an image of (width, height).

    With `max_upscale`, the largest square is smaller where the image would be enlarged by more; the
    smallest one is of the alignment.
    """
    while True:
        size = _nearest(original, bucket_sizes(side, buckets))
        width, height = _part(original, size, buckets.crop)
        scale = max(size[0] / width, size[1] / height)
        if buckets.max_upscale is None or scale <= buckets.max_upscale:
            return size
        if side <= buckets.alignment:
            return size
        side -= buckets.alignment


@lru_cache(maxsize=1024)
def bucket_sizes(side: int, buckets: BucketConfig) -> tuple[Size, ...]:
    """List the sizes (width, height) of at most `side` squared pixels, sorted by width.

    Each multiple of the alignment is a width with the largest possible height, and a height with
    the largest possible width; the largest square is among them. Of configured sizes at least the
    smallest is taken.
    """
    step, area = buckets.alignment, side * side
    if buckets.sizes is not None:
        smallest = min(buckets.sizes, key=_pixels)
        return tuple(sorted({smallest, *(one for one in buckets.sizes if _pixels(one) <= area)}))
    found = {(side // step * step, side // step * step)}
    for one in range(step, area // step + 1, step):
        other = area // one // step * step
        found |= {(one, other), (other, one)}
    return tuple(
        sorted(
            (width, height)
            for width, height in found
            if buckets.min_aspect <= width / height <= buckets.max_aspect
        )
    )


def _pixels(size: Size) -> int:
    return size[0] * size[1]


def merge_small(counts: Counter[Size], least: int) -> dict[Size, Size]:
    """Map each size to the one that its images are trained at.

    The smallest bucket with fewer than `least` images joins the one of the nearest shape, until
    none is left or only one remains.
    """
    counts, target = Counter(counts), {size: size for size in counts}
    while len(counts) > 1:
        smallest = min(counts, key=lambda size: (counts[size], size))
        if counts[smallest] >= least:
            break
        others = [size for size in counts if size != smallest]
        nearest = min(others, key=lambda size: (_distance(smallest, size), _growth(smallest, size)))
        counts[nearest] += counts.pop(smallest)
        target = {size: nearest if to == smallest else to for size, to in target.items()}
    return target


def _nearest(original: Size, sizes: Iterable[Size]) -> Size:
    """Return the size of the nearest aspect ratio; of several, the largest."""
    return min(sizes, key=lambda size: (_distance(original, size), -_pixels(size), size))


def _distance(one: Size, other: Size) -> float:
    """Return how far two aspect ratios are apart."""
    return abs(log(one[0] / one[1]) - log(other[0] / other[1]))


def _growth(one: Size, other: Size) -> tuple[float, Size]:
    """Return how far two areas are apart, and the other size, which decides between equals."""
    return abs(log(_pixels(other) / _pixels(one))), other


def other_views(sample: Sample, view: View, buckets: BucketConfig | None) -> list[View]:
    """Return the other parts of a training image of which a turn can draw one, of the same size.

    Args:
        sample: The sample.
        view: Its first view.
        buckets: The section `data.aspect_buckets`, whose crop_variants counts all views.
    """
    if buckets is None or sample.split != "train":
        return []
    original, image_sha256 = sample.original_size, sample.image_sha256
    return [
        View(_box(original, view.size, image_sha256, buckets.crop, variant), view.size)
        for variant in range(1, buckets.crop_variants)
    ]


def _box(
    original: Size, size: Size, image_sha256: str, crop: str, variant: int = 0
) -> tuple[int, int, int, int]:
    """Return the box of the shape of `size` in an image of (width, height)."""
    if size[0] == size[1] and crop == "center":
        left, top, side = centre_crop(original)
        return left, top, side, side
    width, height = original
    own, tall = _part(original, size, crop)
    left, top = (width - own) // 2, (height - tall) // 2
    if crop == "random":
        draw = generator(int(image_sha256[:16], 16), CROP, 0, variant)
        left, top = (int(draw.integers(free + 1)) for free in (width - own, height - tall))
    return left, top, own, tall


def _part(original: Size, size: Size, crop: str) -> Size:
    """Return width and height of the largest box of the shape of `size`; of all if not cropped."""
    if crop == "none":
        return original
    (width, height), (wide, high) = original, size
    own = min(width, max(1, round(height * wide / high)))
    return own, min(height, max(1, round(width * high / wide)))


def choose_source_views(
    samples: Sequence[Sample], side: int, buckets: BucketConfig | None, own: Mapping[str, int]
) -> list[View]:
    """Choose the view of each sample: its square or bucket at the resolution of its source.

    Args:
        samples: The samples of a dataset.
        side: Side of the square in pixels of sources without a resolution of their own.
        buckets: The section `data.aspect_buckets`; None for squares.
        own: The resolutions of sources that have one, by their names (DataConfig.resolutions).
    """
    sides = [own.get(sample.source, side) for sample in samples]
    views: dict[int, View] = {}
    for one in {*sides}:
        places = [place for place, other in enumerate(sides) if other == one]
        chosen = choose_views([samples[place] for place in places], one, buckets)
        views.update(zip(places, chosen, strict=True))
    return [views[place] for place in range(len(samples))]


def centre_crop(size: tuple[int, int]) -> tuple[int, int, int]:
    """Compute left, top and side of the largest centred square in an image of (width, height)."""
    width, height = size
    side = min(width, height)
    return (width - side) // 2, (height - side) // 2, side


def limit_pixels(size: tuple[int, int], max_pixels: int | None) -> tuple[int, int]:
    """Scale (width, height) down to an area of at most max_pixels, keeping the aspect ratio."""
    width, height = size
    if max_pixels is None or width * height <= max_pixels:
        return size
    scale = sqrt(max_pixels / (width * height))
    width, height = max(1, int(width * scale)), max(1, int(height * scale))
    return min(width, max_pixels), min(height, max_pixels)


def crop_and_resize(image: Image, crop: tuple[int, int, int], resolution: int) -> Image:
    """Cut out the square (left, top, side) and scale it to resolution x resolution (Lanczos).

    Pillow uses integer arithmetic: equal images give equal bytes.
    """
    from PIL.Image import Resampling

    left, top, side = crop
    box = (left, top, left + side, top + side)
    if side == resolution:
        return image.crop(box)
    return image.resize((resolution, resolution), Resampling.LANCZOS, box=box)


def to_pixels(image: Image) -> np.ndarray:
    """Convert an RGB image to float32 [3, H, W] in [-1, 1], as autoencoders expect it."""
    import numpy as np

    pixels = np.asarray(image, dtype=np.float32) / 127.5 - 1
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))
