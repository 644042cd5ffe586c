"""Loss masks: an image's alpha channel, or an image of its own, cut and scaled as the image is."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from zerotrain.data.source import BadImageError
from zerotrain.data.transparency import read_alpha
from zerotrain.errors import PipelineError

if TYPE_CHECKING:
    import numpy as np

    from zerotrain.config.image_options import ImageOptions
    from zerotrain.data.buckets import View
    from zerotrain.data.dataset import Sample
    from zerotrain.data.source import Found, Source


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
