"""Conditioning images in separate folders, matched to images by name."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from zerotrain.data.listing import list_conditioning
from zerotrain.data.source import Found
from zerotrain.errors import PipelineError

if TYPE_CHECKING:
    from zerotrain.config.image_source import ImageSourceConfig


CONDITIONING, MASK = "conditioning image", "mask"


@dataclass(frozen=True)
class _Folder:
    """A folder of conditioning images, by names without extension."""

    name: str
    what: str
    images: dict[str, list[str]]
    bad: dict[str, Found]


class ConditioningFolders:
    """The folders of data.conditioning_images: each has one image for every image of data.images.

    Args:
        data: The section `data` of the configuration.
        names: Other folders instead, as those of data.mask_images.
        what: What an image in them is.

    Raises:
        PipelineError: a folder is missing, unreadable, or has no image.
    """

    def __init__(
        self, data: ImageSourceConfig, names: Sequence[str] | None = None, what: str = CONDITIONING
    ) -> None:
        names = data.conditioning_folders if names is None else names
        self._folders = [_read_folder(data, name, what) for name in names]

    def match(self, entry: Found) -> Found:
        """Return an image with its conditioning images, or the reason why one is missing."""
        names = self.find(entry)
        return names if isinstance(names, Found) else replace(entry, conditioning=names)

    def match_mask(self, entry: Found) -> Found:
        """Return an image with its loss mask, or the reason why it is missing."""
        names = self.find(entry)
        return names if isinstance(names, Found) else replace(entry, mask=names[0])

    def find(self, entry: Found) -> tuple[str, ...] | Found:
        """Return the names that match an image, or the entry with the reason why one is missing."""
        if entry.reason is not None:
            return entry
        names = []
        for folder in self._folders:
            found = folder.images.get(_stem(entry.file), [])
            if len(found) != 1:
                return Found(entry.file, reason=_reason(folder, _stem(entry.file), found))
            names += found
        return tuple(names)

    def surplus(self, images: Iterable[str]) -> list[str]:
        """Return a sentence for each folder with images that match none of `images`."""
        stems = {_stem(image) for image in images}
        notes = []
        for folder in self._folders:
            others = [min(files) for stem, files in folder.images.items() if stem not in stems]
            if others:
                many, belong = ("s", "belong") if len(others) > 1 else ("", "belongs")
                notes.append(
                    f"{len(others)} {folder.what}{many} in {folder.name}, such as {min(others)}, "
                    f"{belong} to no image and {'are' if len(others) > 1 else 'is'} not read"
                )
        return notes


def check_equal_numbers(samples: Iterable[tuple[str, Sequence[object]]]) -> int:
    """Check that all samples have the same number of conditioning images, and return it.

    Args:
        samples: File and conditioning images of each sample.

    Raises:
        PipelineError: two samples have different numbers; the message names both.
    """
    first: tuple[str, int] | None = None
    for file, images in samples:
        first = first or (file, len(images))
        if len(images) != first[1]:
            raise PipelineError(
                f"data.conditioning_columns: {first[0]} has {first[1]} conditioning images and "
                f"{file} has {len(images)}",
                hint="give every sample the same number of them: a batch holds samples together",
            )
    return first[1] if first else 0


def _read_folder(data: ImageSourceConfig, name: str, what: str) -> _Folder:
    listing = list_conditioning(data, name)
    images: dict[str, list[str]] = {}
    for image in sorted(listing.images):
        images.setdefault(_stem(image), []).append(image)
    if labels := listing.masks if what == MASK else listing.conditioning:
        images = {stem: [image] for stem, image in labels.items()}
    return _Folder(name, what, images, {_stem(entry.file): entry for entry in listing.bad})


def _reason(folder: _Folder, stem: str, found: Sequence[str]) -> str:
    if found:
        return f"{len(found)} {folder.what}s in {folder.name}: {' and '.join(found)}"
    if stem in folder.bad:
        bad = folder.bad[stem]
        return f"{folder.what} {os.path.join(folder.name, bad.file)}: {bad.reason}"
    return f"no {folder.what}: no {stem}.* in {folder.name}"


def _stem(file: str) -> str:
    return os.path.splitext(file)[0]
