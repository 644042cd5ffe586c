"""Loss masks: their keys, and their scaling to the latents that they belong to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from zerotrain.artifact.tensor_file import FLOAT_TYPES
from zerotrain.cache.keys import mask_key
from zerotrain.cache.layout import LATENTS, MASK
from zerotrain.cache.reuse import Group
from zerotrain.cache.writer import StoredShards, Tensors
from zerotrain.data.masks import read_mask

if TYPE_CHECKING:
    from zerotrain.data.buckets import View
    from zerotrain.data.dataset import Sample
    from zerotrain.data.source import Source

COMPUTED = "fp32"
"""Dtype of the means of a mask's pixels."""


class Masks:
    """The loss masks of a dataset at one resolution.

    Args:
        source: The source of the images.
        dtype: Dtype of the stored tensors.
    """

    def __init__(self, source: Source, dtype: str) -> None:
        self._source = source
        self._dtype = FLOAT_TYPES[dtype]
        self._known: dict[str, tuple[Sample, View, str]] = {}

    def keys(self, sample: Sample, views: Iterable[tuple[View, str]]) -> list[str]:
        """Return the keys of the masks of a sample's views, each with the key of its latents.

        A sample without a mask has none.
        """
        if sample.mask_sha256 is None:
            return []
        found = []
        for view, latents in views:
            found.append(mask_key(sample.mask_sha256, latents))
            self._known[found[-1]] = (sample, view, latents)
        return found

    def scaled(self, keys: Sequence[str], stored: StoredShards) -> Iterator[Tensors]:
        """Scale the mask of each key to its latents.

        Args:
            keys: Keys that were returned by keys().
            stored: The cache's content, which has the mask or the latents of each key.

        Raises:
            PipelineError: a mask changed since prepare_dataset.
        """
        for key in keys:
            sample, view, latents = self._known[key]
            like = stored.tensors(key)[MASK] if key in stored else stored.tensors(latents)[LATENTS]
            height, width = like.shape[-2:]
            mask = torch.from_numpy(read_mask(self._source, sample, view, (width, height)))
            yield {MASK: mask.to(self._dtype).contiguous()}

    def group(self, keys: Sequence[str], stored: StoredShards) -> Group:
        """Return what is compared of stored masks after an upgrade."""
        return Group(
            *("loss masks", keys, lambda chosen: self.scaled(chosen, stored)),
            *(COMPUTED, lambda key: self._known[key][0].file),
        )
