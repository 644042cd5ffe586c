"""How much of a cache would be encoded: the samples of a dataset that the cache's index lacks.

A cached item is identified by what decides its key (zerotrain.cache.keys) apart from the encoder:
image, crop and size, mirrored or not; or the caption. A changed encoder is known from the job's
changed values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zerotrain.artifact import read_manifest
from zerotrain.data.buckets import other_views
from zerotrain.data.dataset import Sample, choose_split
from zerotrain.data.source_views import choose_source_views
from zerotrain.errors import PipelineError
from zerotrain.pipeline.why.samples import Present, count

if TYPE_CHECKING:
    from zerotrain.cache.layout import Index, Series
    from zerotrain.config.data import DataConfig

EVERY_KEY = {"cache.dtype"}
"""Values of which every key depends."""
TEXT_KEYS = {"cache.max_sequence_length", "train.long_captions"}
"""Values of which the keys of captions depend."""
Item = tuple[object, ...]


@dataclass(frozen=True)
class Encodes:
    """The items that would be encoded, of all items of the dataset."""

    images: int
    of_images: int
    """Latents, those of mirrored images included."""
    captions: int
    of_captions: int
    """Different captions, without the empty one."""
    bytes: int | None
    """Of the encoded items on the disk; None if there is no cache to learn their size from."""
    at_most: tuple[str, ...] = ()
    """Of what some may be in the cache, `images` or `captions`: their encoder is built again."""

    def __str__(self) -> str:
        images = f"{self.images:,} of {count(self.of_images, 'image')}"
        captions = f"{self.captions:,} of {count(self.of_captions, 'caption')}"
        up_to = {kind: "up to " if kind in self.at_most else "" for kind in ("images", "captions")}
        return f"encodes {up_to['images']}{images} and {up_to['captions']}{captions}"


def count_encodes(
    cache: Path,
    size: int,
    present: Sequence[Present],
    former: Sequence[Sample],
    data: DataConfig,
    *,
    changed: Collection[str] = (),
    again: Collection[str] = (),
    damaged: Collection[str] = (),
) -> Encodes:
    """Count what cache_latents would encode.

    Args:
        cache: Folder of the cache; missing: everything is encoded.
        size: Side of its squares in pixels.
        present: The samples as they will be in the dataset.
        former: The samples of the published dataset, whose sizes are known.
        data: The section `data` of the configuration.
        changed: Keys of the configuration that changed since the cache was made.
        again: The encoders that the base may have again: `images`, `captions`.
        damaged: Names of damaged shards, whose items are encoded again.
    """
    index = _read_index(cache)
    images = _images(present, former, size, data)
    captions = {(caption,) for one in present for caption in one.captions_sha256}
    have_images, have_captions = _held(index, damaged) if index else (Counter(), set())
    if EVERY_KEY & {*changed} or "images" in again:
        have_images = Counter()
    if (EVERY_KEY | TEXT_KEYS) & {*changed} or "captions" in again:
        have_captions = set()
    lacking = (images - have_images).total(), len(captions - have_captions)
    each = _bytes_each(cache)
    return Encodes(
        *(lacking[0], images.total(), lacking[1], len(captions)),
        bytes=lacking[0] * each[0] + lacking[1] * each[1] if each else None,
        at_most=tuple(sorted(again)) if index else (),
    )


def _read_index(cache: Path) -> Index | None:
    from zerotrain.cache.layout import read_index  # its package imports torch

    try:
        return read_index(cache)
    except (OSError, ValueError):
        return None


def _images(
    present: Sequence[Present], former: Sequence[Sample], size: int, data: DataConfig
) -> Counter[Item]:
    """Count the latents of all samples. The size of a new image is unknown, and needed for none of
    its own: the cache has nothing of it. With `merge_below` it could move others."""
    # The name of its source decides the resolution of an image.
    known = {(one.image_sha256, one.source): one for one in former}
    pairs = [(one, known.get((one.image_sha256, _source_of(one, data)))) for one in present]
    samples = [sample for _, sample in pairs if sample]
    views = choose_source_views(samples, size, data.aspect_buckets, data.resolutions)
    buckets = data.aspect_buckets
    cuts: dict[tuple[str, str], list[tuple[object, object]]] = {
        (sample.image_sha256, sample.source): [
            ((one.crop_top_left, one.size[::-1]), one.box)
            for one in (view, *other_views(sample, view, buckets))
        ]
        for sample, view in zip(samples, views, strict=True)
    }
    # Crops that differ by less than a pixel of the scaled image are one item several times.
    found: set[tuple[Item, object]] = set()
    for one in present:
        sha256 = one.image_sha256
        trains = choose_split(sha256, data.holdout) == "train"
        number = buckets.crop_variants if buckets and trains else 1
        unknown = [(None, variant) for variant in range(number)]
        for cut, box in cuts.get((sha256, _source_of(one, data)), unknown):
            found.add(((sha256, cut, False), box))
            if data.part_of(one.file).random_flip and trains:
                found.add(((sha256, cut, True), box))
    return Counter(item for item, _ in found)


def _source_of(one: Present, data: DataConfig) -> str:
    """Return the name of an image's source, of several."""
    return one.file.partition("/")[0] if data.sources else ""


def _held(index: Index, damaged: Collection[str]) -> tuple[Counter[Item], set[Item]]:
    """Count the latents, and identify the captions, in the intact shards of a cache."""
    images: set[tuple[Item, str]] = set()
    captions: set[Item] = set()
    for entry in index.entries:
        others = entry.other_crops or ()
        crops = [entry.crop_top_left, *zip(others[::2], others[1::2], strict=True)]
        for mirrored, keys in (
            (False, (entry.latents, *(entry.other_latents or ()))),
            (True, (entry.flipped, *(entry.other_flipped or ()))),
        ):
            for key, crop in zip(keys, crops, strict=False):
                if key and not _is_in(key, index.latents, "latents", damaged):
                    item = (entry.image_sha256, (crop, entry.target_size), mirrored)
                    images.add((item, key))
        texts = (entry.text, *(entry.other_texts or ()))
        digests = (entry.caption_sha256, *(entry.other_captions_sha256 or ()))
        for key, sha256 in zip(texts, digests, strict=True):
            if not _is_in(key, index.text, "text", damaged):
                captions.add((sha256,))
    return Counter(item for item, _ in images), captions


def _is_in(key: str, series: Series, name: str, shards: Collection[str]) -> bool:
    """Return whether the shard of a key is one of these."""
    if not shards:
        return False
    from zerotrain.cache.layout import shard_file, shard_number

    return shard_file(name, shard_number(key, series.count), series.count) in shards


def _bytes_each(cache: Path) -> tuple[int, int] | None:
    """Return the mean bytes of a cache's latents and captions; None without a cache."""
    try:
        manifest = read_manifest(cache, "cache")
        counts: Mapping[str, int] = manifest.content["count"]
        return (
            _mean_bytes(manifest.files.items(), "latents-", counts["latents"]),
            _mean_bytes(manifest.files.items(), "text-", counts["captions"]),
        )
    except (PipelineError, OSError, LookupError, TypeError):
        return None


def _mean_bytes(files: Iterable[tuple[str, Mapping[str, int]]], prefix: str, items: int) -> int:
    total = sum(entry["bytes"] for name, entry in files if name.startswith(prefix))
    return -(-total // max(1, items))
