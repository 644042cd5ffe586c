"""The digest of what a training draws from a cache of images, regardless of keys and code.

A cache's index has it, so that a training of millions of images does not compute it at its start.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from zerotrain.artifact import streamed_digest
from zerotrain.cache.layout import Entry

OTHERS = (
    *("repeats", "share", "other_captions_sha256", "other_crops"),
    *("loss_weight", "background", "mask_sha256"),
)
"""What else a turn of a sample can draw, and how it counts."""


def drawn_digest(entries: Iterable[Entry], dtype: Any, max_sequence_length: Any) -> str:
    """Compute the digest of the train split's pixels, captions, crops and sizes.

    It is the digest of {"samples": [...], "dtype": ..., "max_sequence_length": ...}.

    Args:
        entries: Samples of both splits.
        dtype: The cache's dtype.
        max_sequence_length: The setting that texts were encoded with.
    """
    samples = (_drawn(one) for one in entries if one.split == "train")
    values = {"samples": samples, "dtype": dtype, "max_sequence_length": max_sequence_length}
    return streamed_digest(values)


def _drawn(entry: Entry) -> list[Any]:
    return [
        entry.image_sha256,
        entry.caption_sha256,
        entry.original_size,
        entry.crop_top_left,
        entry.target_size,
        entry.flipped is not None,
        entry.conditioning_sha256,
        *(getattr(entry, name) for name in OTHERS),
    ]
