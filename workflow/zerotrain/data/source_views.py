"""The part of each image that is trained, where sources have resolutions of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from zerotrain.data.buckets import View, choose_views

if TYPE_CHECKING:
    from zerotrain.config.data import BucketConfig
    from zerotrain.data.dataset import Sample


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
