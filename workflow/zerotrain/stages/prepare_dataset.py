"""prepare_dataset: publish the checked, hashed samples of a source's images or text."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from zerotrain.artifact.documents import LeftOut
from zerotrain.artifact.recipe import Recipe
from zerotrain.config.data import DataConfig
from zerotrain.config.image_source import WHITE, ImageSourceConfig
from zerotrain.config.scalar import one_line
from zerotrain.data.buckets import centre_crop, limit_pixels
from zerotrain.data.captions import (
    describe_changes,
    describe_placeholders,
    edit_captions,
    split_captions,
)
from zerotrain.data.conditioning import check_equal_numbers, check_mask, check_opaque
from zerotrain.data.conversation import TEXTS, Conversation
from zerotrain.data.dataset import (
    IMAGES,
    ConditioningImage,
    Sample,
    caption_sha256,
    choose_split,
)
from zerotrain.data.dataset_folder import count_samples, publish_dataset
from zerotrain.data.decode import UNUSED_PROFILE, read_alpha
from zerotrain.data.files import DatasetFiles, walk
from zerotrain.data.image_summary import format_summary, is_same_shape, summarise_images
from zerotrain.data.open import open_source, source_values
from zerotrain.data.source import BadImageError, Found, Source
from zerotrain.data.text import read_conversations_of
from zerotrain.errors import PipelineError
from zerotrain.machine.ordered_pool import in_order
from zerotrain.machine.progress_bar import progress

SHOWN = 10
"""Bad samples listed in a message; the dataset lists all."""


def prepare_dataset(
    data: DataConfig,
    output: Path,
    resolution: int | None = None,
    recipe: Recipe | None = None,
) -> None:
    """Check every image and caption, or every row of text, and publish the dataset.

    Args:
        data: The `data` section of a run's configuration.
        output: Folder of the dataset; caches in it stay.
        resolution: Largest side of squares in pixels, only for the printed summary.
        recipe: What the folder records of what it is made from.

    Raises:
        PipelineError: the source cannot be used, has more bad samples than data.max_bad_samples,
            leaves nothing to train on, or gives two samples different numbers of conditioning
            images.
    """
    files, left_out = None, LeftOut()
    if data.is_text:
        checked: list[Sample | Conversation | Found] = [*read_conversations_of(data, left_out)]
        name = data.path or data.source
    else:
        source = open_source(data)
        name = source.name
        if data.has_image_files:
            files = DatasetFiles(data, output, walk(data))
        checked = [*checked_images(source, data)]
        left_out.update(source.left_out)
    bad = [entry for entry in checked if isinstance(entry, Found)]
    images = [entry for entry in checked if isinstance(entry, Sample)]
    texts = [entry for entry in checked if isinstance(entry, Conversation)]
    samples = images or texts
    if len(bad) > data.max_bad_samples or not samples:
        raise _too_many(name, bad, len(checked), data.max_bad_samples)
    conditioning = check_equal_numbers((sample.file, sample.conditioning) for sample in images)
    refused = [{"file": entry.file, "reason": entry.reason or ""} for entry in bad]
    count = count_samples(samples, refused)
    what = "examples" if data.is_text else "images"
    if not count["train"]:
        raise PipelineError(
            f"data.holdout: {data.holdout} keeps all {len(samples)} {what} from training",
            hint=f"lower data.holdout or add {what}",
        )
    if data.holdout and not count["holdout"]:
        _warn(f"data.holdout: {data.holdout} of {len(samples)} {what} came to none")
    if files is not None:
        read = files.record(dict(_hashed(source, images)))
        recipe = recipe and recipe.with_inputs({"files": read})
    numbers = data.model_dump(exclude={"name", "num_workers", "max_bad_samples"})
    made_by = {"stage": "prepare_dataset", "data": numbers}
    rest: dict[str, Any] = {
        "repeats": data.repeats, "bad": refused, "left_out": left_out, "made_by": made_by,
        "recipe": recipe,
    }  # fmt: skip
    listing = (
        publish_dataset(output, TEXTS, texts, **rest)
        if data.is_text
        else publish_dataset(output, IMAGES, images, **rest)
    )
    if bad:
        _warn(
            f"{len(bad)} of {len(checked)} samples are bad and left out; {listing} lists them:"
            f"{_list(bad)}"
        )
    for line in left_out.lines():
        _warn(one_line(line))
    summary = f"{count['train']} {what} to train on and {count['holdout']} held out"
    if conditioning:
        summary += f", each with {conditioning} conditioning image{'s' * (conditioning > 1)}"
    captions = len({caption for sample in images for caption in sample.captions})
    print(summary + (f", with {captions} different captions" if images else ""))
    if images:
        seen = summarise_images(images, resolution, data.aspect_buckets, data.resolutions)
        for line in format_summary(seen):
            print(one_line(line))


def checked_images(source: Source, data: DataConfig) -> Iterator[Sample | Found]:
    """Read and check every image of the source once, in the order of the dataset."""
    found, changed = edit_captions(source.found(), data.part_of)
    for note in source.notes:
        _warn(one_line(note))
    if placeholders := describe_placeholders(found):
        _warn(placeholders)
    if changes := describe_changes(changed, sum(not entry.reason for entry in found)):
        print(changes)
    unused: dict[str, str] = {}
    yield from progress(
        in_order(lambda entry: _check(source, entry, data, unused), found, data.num_workers),
        len(found),
        "checking images",
        "image",
    )
    if unused:
        file = min(unused)
        _warn(
            f"{len(unused)} images have a colour profile that cannot be used, such as "
            f"{one_line(f'{file}: {unused[file]}')}; their colours are taken as sRGB"
        )


def _check(
    source: Source, entry: Found, data: DataConfig, unused: dict[str, str]
) -> Sample | Found:
    """Read an entry's pixels and return its sample, or the entry with a reason against it.

    `unused` gets the reason why its colour profile is not used, by file.
    """
    if entry.reason:
        return entry
    part = data.part_of(entry.file)
    try:
        content = source.read(entry.file)
        image = source.decode(content)
        if UNUSED_PROFILE in image.info:
            unused[entry.file] = image.info[UNUSED_PROFILE]
        mask_sha256 = check_mask(source, entry, content, image.size, part)
    except BadImageError as error:
        return Found(entry.file, reason=str(error))
    except OSError as error:
        return Found(entry.file, reason=str(error.strerror))
    shape = image.size if data.aspect_buckets is not None else None
    try:
        conditioning = tuple(
            _check_conditioning(source.conditioning_source(position), file, shape)
            for position, file in enumerate(entry.conditioning)
        )
    except BadImageError as error:
        return Found(entry.file, reason=str(error))
    image_sha256 = hashlib.sha256(content).hexdigest()
    split = choose_split(image_sha256, data.holdout)
    caption, *others = split_captions(entry, part, split)
    return Sample(
        file=entry.file,
        image_sha256=image_sha256,
        caption=caption,
        caption_sha256=caption_sha256(caption),
        original_size=image.size,
        size=limit_pixels(image.size, part.max_pixels),
        crop=centre_crop(image.size),
        split=split,
        conditioning=conditioning,
        **source_values(part, entry.repeats),
        other_captions=tuple(others),
        loss_weight=part.loss_weight,
        background=_background(content, part),
        mask=entry.mask,
        mask_sha256=mask_sha256,
    )


def _background(content: bytes, data: ImageSourceConfig) -> str | None:
    """Return the colour behind an image's transparent pixels, where it is not white."""
    colour = data.transparent_background.lower()
    return colour if colour != WHITE and read_alpha(content) is not None else None


def _hashed(source: Source, samples: Sequence[Sample]) -> Iterator[tuple[str, str]]:
    """Yield path and sha256 of the images of samples."""
    for sample in samples:
        yield source.path_of(sample.file), sample.image_sha256
        if sample.mask is not None and sample.mask_sha256 is not None:
            yield source.mask_source(sample.file).path_of(sample.mask), sample.mask_sha256
        for position, image in enumerate(sample.conditioning):
            folder = source.conditioning_source(position).name
            yield os.path.join(folder, image.file), image.image_sha256


def _check_conditioning(
    source: Source, file: str, shape: tuple[int, int] | None
) -> ConditioningImage:
    """Return the conditioning image with this name in its source.

    Args:
        source: The source.
        file: The name.
        shape: Width and height of its image, if both are to have one aspect ratio: then the same
            part of both is cut.

    Raises:
        BadImageError: it cannot be read, has transparent pixels, or is of another shape.
    """
    try:
        content = source.read(file)
        size = source.decode(content).size
        check_opaque(content)
        if shape is not None and not is_same_shape(shape, size):
            raise BadImageError(
                f"{size[0]}x{size[1]} pixels are of another aspect ratio than the "
                f"{shape[0]}x{shape[1]} of its image, with which data.aspect_buckets cuts it"
            )
    except (BadImageError, OSError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise BadImageError(f"conditioning image {Path(source.name, file)}: {why}") from error
    return ConditioningImage(
        file=file,
        image_sha256=hashlib.sha256(content).hexdigest(),
        original_size=size,
        crop=centre_crop(size),
    )


def _too_many(name: str, bad: Sequence[Found], total: int, limit: int) -> PipelineError:
    allowed = f"data.max_bad_samples allows {limit}" if len(bad) > limit else "none is left"
    return PipelineError(
        f"{name}: {len(bad)} of {total} samples are bad, {allowed}:{_list(bad)}",
        hint="fix or remove them, or raise data.max_bad_samples to skip them",
    )


def _list(bad: Sequence[Found]) -> str:
    lines = [f"\n       {one_line(f'{entry.file}: {entry.reason}')}" for entry in bad[:SHOWN]]
    more = f"\n       and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
    return "".join(lines) + more


def _warn(sentence: str) -> None:
    print(f"WARNING: {sentence}", file=sys.stderr, flush=True)
