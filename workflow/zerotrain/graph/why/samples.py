"""How the source of a dataset differs from the published dataset, sample by sample.

An image is read only where the listing of the dataset's files (zerotrain.data.files) does not tell
its sha256.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from zerotrain.config.image_source import WHITE
from zerotrain.config.suggestions import join_first
from zerotrain.data.buckets import centre_crop, limit_pixels
from zerotrain.data.captions import prepare_captions
from zerotrain.data.dataset import Dataset, Sample, caption_sha256, choose_split, read_dataset
from zerotrain.data.decode import read_alpha, read_size
from zerotrain.data.files import DatasetFiles
from zerotrain.data.open import open_source, source_values
from zerotrain.data.source import BadImageError, Found, Source
from zerotrain.errors import PipelineError

if TYPE_CHECKING:
    from zerotrain.config.data import DataConfig

NAMES_SHOWN = 5
UNREAD = (96, 64)
"""Width and height that an image counts with that is not read: the usual shape of a photograph."""
SHA256 = re.compile("[0-9a-f]{64}")
QUICK_SAMPLES = 2000
"""Samples that a quick look compares; it must not keep a dry run waiting."""


@dataclass
class SampleChanges:
    """The differences between a source and the dataset that was made from it, as file names."""

    samples: list[Sample] = field(default_factory=list)
    """All usable samples of the source, in the dataset's order, as far as they are read: without
    sizes in a quick look, and without masks that are new."""
    images: list[str] = field(default_factory=list)
    """Samples with another image under the same name."""
    captions: list[str] = field(default_factory=list)
    """Samples with another caption."""
    added: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    renamed: list[tuple[str, str]] = field(default_factory=list)
    """Old and new name of the same image."""
    unusable: list[Found] = field(default_factory=list)
    """Samples that the source still has, but that cannot be used now."""
    trains_same: bool = False
    """Whether the training samples have the same images and captions in the same order."""
    trains_same_images: bool = False
    """Whether they have the same images in the same order."""

    def sentences(self) -> list[str]:
        """Describe each kind of change, as `2 captions changed: a.png, b.png`."""
        renamed = [f"{old} -> {new}" for old, new in self.renamed]
        unusable = [f"{one.file} ({one.reason})" for one in self.unusable]
        kinds = {
            "image {} changed": self.images,
            "caption {} changed": self.captions,
            "image {} added": self.added,
            "image {} removed": self.removed,
            "image {} renamed": renamed,
            "image {} unusable": unusable,
        }
        return [_sentence(kind, names) for kind, names in kinds.items() if names]


def compare_samples(
    data: DataConfig, dataset: Path, *, quick: bool = False
) -> SampleChanges | None:
    """Compare a dataset of images with its source.

    Args:
        data: The section `data` of the configuration.
        dataset: Folder of the published dataset.
        quick: Give up on a dataset of many samples.

    Returns:
        None if they cannot be compared: the dataset is unreadable, of text or with conditioning
        images, the source is unusable, or a quick look would not be quick.
    """
    if data.source != "folder" or data.conditioning_folders or data.conditioning_columns:
        return None
    try:
        published = read_dataset(dataset, verify=not quick)
        samples = published.samples
        if quick and len(samples) > QUICK_SAMPLES:
            return None
        source = open_source(data)
        found = source.found()
        known = DatasetFiles(data, dataset).tokens
    except (PipelineError, OSError, ValueError, LookupError, TypeError):
        return None
    before = {sample.file for sample in samples}
    look = _Look(source, data, published, sizes=not quick)
    present, unusable = [], []
    for entry in found:
        one = entry
        if one.reason is None:
            path = source.path_of(one.file)
            try:
                sha256 = SHA256.fullmatch(known.get(path, "")) and known[path]
                image = sha256 or source.sha256(one.file)
                split = choose_split(image, data.holdout)
                captions = prepare_captions(one, data.part_of(one.file), split)
                if captions:
                    present.append(look.at(one, image, captions))
                else:
                    one = Found(one.file, reason="nothing is left of its caption")
            except OSError as error:
                one = Found(one.file, reason=str(error.strerror))
        if one.reason is not None and one.file in before:
            unusable.append(one)
    return _differences(samples, present, unusable)


class _Look:
    """Tells what is new in a source from the dataset that was made of it, and reads the rest."""

    def __init__(
        self, source: Source, data: DataConfig, published: Dataset, *, sizes: bool
    ) -> None:
        self._source, self._data, self._sizes = source, data, sizes
        # The source of an image decides how large it is, and what is behind it.
        self._known = {(one.image_sha256, one.source): one for one in published.samples}
        try:
            self._former: DataConfig | None = type(data)(**published.artifact.made_by["data"])
        except (ValueError, LookupError, TypeError):
            self._former = None

    def at(self, entry: Found, image_sha256: str, captions: Sequence[str]) -> Sample:
        """Return the sample that an entry becomes."""
        part = self._data.part_of(entry.file)
        of_source = source_values(part, entry.repeats)
        known = self._known.get((image_sha256, of_source.get("source", "")))
        size = known.original_size if known else self._size(entry.file)
        return Sample(
            file=entry.file,
            image_sha256=image_sha256,
            caption=captions[0],
            caption_sha256=caption_sha256(captions[0]),
            original_size=size,
            size=limit_pixels(size, part.max_pixels),
            crop=centre_crop(size),
            split=choose_split(image_sha256, self._data.holdout),
            **of_source,
            other_captions=tuple(captions[1:]),
            loss_weight=part.loss_weight,
            background=self._background(entry.file, part.transparent_background.lower(), known),
            mask=known.mask if known else None,
            mask_sha256=known.mask_sha256 if known else None,
        )

    def _size(self, file: str) -> tuple[int, int]:
        try:
            return read_size(self._source.read(file)) if self._sizes else UNREAD
        except BadImageError:
            return UNREAD

    def _background(self, file: str, colour: str, known: Sample | None) -> str | None:
        """Return the colour behind an image's transparent pixels, where it is not white."""
        if colour == WHITE or (known and known.background):
            return colour if colour != WHITE else None
        former = self._former.part_of(file) if self._former and known else None
        if not self._sizes or (former and former.transparent_background.lower() != WHITE):
            return None  # it had a colour, and no pixel for it
        try:
            return colour if read_alpha(self._source.read(file)) is not None else None
        except (OSError, BadImageError):
            return None


name_some = partial(join_first, limit=NAMES_SHOWN)
"""Name the first five, and count the others."""


def count(number: int, what: str) -> str:
    """Return `1 image` or `2 images`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _sentence(kind: str, names: list[str]) -> str:
    what, _, verb = kind.partition(" {} ")
    return f"{count(len(names), what)} {verb}: {name_some(names)}"


def _differences(
    samples: Sequence[Sample], present: list[Sample], unusable: list[Found]
) -> SampleChanges:
    before, now = {one.file: one for one in samples}, {one.file: one for one in present}
    gone = before.keys() - now.keys() - {one.file for one in unusable}
    new = now.keys() - before.keys()
    changes = SampleChanges(present, unusable=unusable)
    by_image: dict[str, list[str]] = {}
    for file in sorted(gone, reverse=True):
        by_image.setdefault(before[file].image_sha256, []).append(file)
    for file in sorted(new):
        if former := by_image.get(now[file].image_sha256):
            changes.renamed.append((former.pop(), file))
        else:
            changes.added.append(file)
    pairs = [*changes.renamed, *((file, file) for file in sorted(before.keys() & now.keys()))]
    for old, file in pairs:
        if before[old].image_sha256 != now[file].image_sha256:
            changes.images.append(file)
        if before[old].captions != now[file].captions:
            changes.captions.append(file)
    changes.removed = sorted(gone - {old for old, _ in changes.renamed})
    trained, trains = _trained(samples), _trained(present)
    changes.trains_same = trained == trains
    changes.trains_same_images = [one for one, _ in trained] == [one for one, _ in trains]
    return changes


def _trained(samples: Iterable[Sample]) -> list[tuple[str, tuple[str, ...]]]:
    return [(one.image_sha256, one.captions) for one in samples if one.split == "train"]
