"""Conditioning images in separate folders, or with prompts, and loss masks."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from zerotrain.artifact.documents import DocumentError, read_bytes
from zerotrain.data.listing import check_usable_path, list_conditioning
from zerotrain.data.source import MOST_IMAGE_BYTES, BadImageError, Found
from zerotrain.errors import PipelineError

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

    from zerotrain.config.image_source import ImageOptions, ImageSourceConfig
    from zerotrain.data.buckets import View
    from zerotrain.data.dataset import Sample
    from zerotrain.data.source import Found, Source

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


def prompt_files(images: Iterable[Sequence[str]], key: str) -> list[str]:
    """List the files of the conditioning images of all prompts, each once, sorted.

    Args:
        images: The files of each prompt; relative paths start from the working directory.
        key: The key of the configuration that names them.

    Raises:
        PipelineError: a file is missing, or its name is not UTF-8.
    """
    files = sorted({str(Path(file).expanduser()) for of_prompt in images for file in of_prompt})
    for file in files:
        if not Path(file).is_file():
            raise PipelineError(
                f"{key}: {file}: no such file",
                hint="relative paths count from where snakemake runs",
            )
        check_usable_path(Path(file), key)
    return files


def read_conditioning_images(files: Sequence[str | Path], key: str) -> list[Image]:
    """Read files as upright RGB, as prepare_dataset reads those of a dataset.

    Args:
        files: Image files; relative paths start from the working directory.
        key: The option or the key of the configuration that names them.

    Raises:
        PipelineError: a file is missing, is not a readable image, or has transparent pixels.
    """
    from zerotrain.data.decode import decode

    found = []
    for file in files:
        try:
            content = read_bytes(Path(file).expanduser(), most=MOST_IMAGE_BYTES, follow_links=True)
            found.append(decode(content))
            check_opaque(content)
        except (OSError, DocumentError, BadImageError) as error:
            why = getattr(error, "strerror", None) or getattr(error, "why", error)
            raise PipelineError(
                f"{key}: {file}: {why}", hint="give image files (.png, .jpg, .webp, ...)"
            ) from error
    return found


def check_opaque(data: bytes) -> None:
    """Check that an image is opaque: over white, a mask on a transparent background is all white.

    Args:
        data: The file's bytes, as for decode.

    Raises:
        BadImageError: a pixel is not fully opaque.
    """
    from zerotrain.data.decode import read_alpha

    if read_alpha(data) is not None:
        raise BadImageError("has transparent pixels; save it without an alpha channel")


def check_mask(
    source: Source, entry: Found, content: bytes, size: tuple[int, int], options: ImageOptions
) -> str | None:
    """Return the sha256 of the file with a sample's mask; None if nothing of it is masked.

    Args:
        source: The source of the image.
        entry: The image, with the name of its mask if it has one.
        content: The bytes of the image.
        size: Its width and height, upright.
        options: The configuration.

    Raises:
        BadImageError: the mask cannot be read, or is of another size.
    """
    from zerotrain.data.decode import read_alpha

    if options.loss_mask == "alpha":
        return hashlib.sha256(content).hexdigest() if read_alpha(content) else None
    if entry.mask is None:
        return None
    masks = source.mask_source(entry.file)
    try:
        data = masks.read(entry.mask)
        found = masks.decode(data).size
    except (BadImageError, OSError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise BadImageError(f"mask {entry.mask} in {masks.name}: {why}") from error
    if found != size:
        raise BadImageError(
            f"mask {entry.mask} in {masks.name} has {found[0]}x{found[1]} pixels and its image "
            f"{size[0]}x{size[1]}"
        )
    return hashlib.sha256(data).hexdigest()


def read_mask(source: Source, sample: Sample, view: View, size: tuple[int, int]) -> np.ndarray:
    """Return how much each latent of a view counts, float32 [1, h, w] in [0, 1].

    Args:
        source: The source of the sample.
        sample: A sample with a mask.
        view: The part of the image.
        size: Width and height of its latents; each is the mean of its pixels' mask.

    Raises:
        PipelineError: the mask is missing or unreadable, or has changed.
    """
    import numpy as np
    from PIL import Image

    from zerotrain.data.decode import read_alpha

    assert sample.mask_sha256
    if sample.mask is None:
        data = source.read(sample.file)
        mask = read_alpha(data)
        if mask is None or hashlib.sha256(data).hexdigest() != sample.mask_sha256:
            raise PipelineError(
                f"{source.name}: {sample.file} changed since prepare_dataset",
                hint="run snakemake again: it prepares the dataset again",
            )
    else:
        masks = source.mask_source(sample.file)
        mask = masks.image_of(sample.mask, sample.mask_sha256).convert("L")
    left, top, width, height = view.box
    box = (left, top, left + width, top + height)
    scaled = mask.resize(size, Image.Resampling.BOX, box=box)
    return np.asarray(scaled, dtype=np.float32)[None] / 255
