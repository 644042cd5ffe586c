"""prepare_dataset: images and captions of the source to a manifest of checked, hashed samples."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

from zerotrain import artifact
from zerotrain.config import DataConfig
from zerotrain.data.crop import centre_crop, limit_pixels
from zerotrain.data.dataset import (
    KIND,
    Sample,
    caption_sha256,
    choose_split,
    dataset_content,
)
from zerotrain.data.source import BadImage, Found, Source, open_source
from zerotrain.errors import PipelineError
from zerotrain.progress import progress
from zerotrain.workers import in_order

SHOWN = 10
"""Bad samples listed in a message; the manifest lists all."""


def prepare_dataset(data: DataConfig, output: Path) -> None:
    """Check every image and caption, and publish the dataset's manifest.

    Args:
        data: The `data` section of a run's configuration.
        output: Folder of the dataset; caches that lie in it stay.

    Raises:
        PipelineError: the source cannot be used, has more bad samples than data.max_bad_samples,
            or leaves nothing to train on.
    """
    source = open_source(data)
    found = source.found()
    for note in source.notes:
        _warn(note)
    checked = list(
        progress(
            in_order(lambda entry: _check(source, entry, data), found, data.num_workers),
            len(found),
            "checking images",
            "image",
        )
    )
    samples = [entry for entry in checked if isinstance(entry, Sample)]
    bad = [entry for entry in checked if isinstance(entry, Found)]
    if len(bad) > data.max_bad_samples or not samples:
        raise _too_many(source, bad, len(found), data.max_bad_samples)
    content = dataset_content(
        samples,
        repeats=data.repeats,
        bad=[{"file": entry.file, "reason": entry.reason or ""} for entry in bad],
    )
    if not content["count"]["train"]:
        raise PipelineError(
            f"data.holdout: {data.holdout} keeps all {len(samples)} images from training",
            hint="lower data.holdout or add images",
        )
    if data.holdout and not content["count"]["holdout"]:
        _warn(f"data.holdout: {data.holdout} of {len(samples)} images came to none")
    numbers = data.model_dump(exclude={"name", "num_workers", "max_bad_samples"})
    artifact.publish_manifest(
        output, KIND, content, made_by={"stage": "prepare_dataset", "data": numbers}
    )
    if bad:
        _warn(
            f"{len(bad)} of {len(found)} samples are bad and left out; `bad` in "
            f"{output / artifact.MANIFEST} lists them:{_list(bad)}"
        )
    print(
        f"{content['count']['train']} images to train on and {content['count']['holdout']} held "
        f"out, with {len({sample.caption for sample in samples})} different captions"
    )


def _check(source: Source, entry: Found, data: DataConfig) -> Sample | Found:
    """The sample that an entry is, once its pixels have been read; or why it is none."""
    if entry.reason:
        return entry
    try:
        content = source.read(entry.file)
        image = source.decode(content)
    except BadImage as error:
        return Found(entry.file, reason=str(error))
    except OSError as error:
        return Found(entry.file, reason=str(error.strerror))
    image_sha256 = hashlib.sha256(content).hexdigest()
    return Sample(
        file=entry.file,
        image_sha256=image_sha256,
        caption=entry.caption,
        caption_sha256=caption_sha256(entry.caption),
        original_size=image.size,
        size=limit_pixels(image.size, data.max_pixels),
        crop=centre_crop(image.size),
        split=choose_split(image_sha256, data.holdout),
    )


def _too_many(source: Source, bad: Sequence[Found], total: int, limit: int) -> PipelineError:
    allowed = f"data.max_bad_samples allows {limit}" if len(bad) > limit else "none is left"
    return PipelineError(
        f"{source.name}: {len(bad)} of {total} samples are bad, {allowed}:{_list(bad)}",
        hint="mend or remove them, or raise data.max_bad_samples to go on without them",
    )


def _list(bad: Sequence[Found]) -> str:
    lines = [f"\n       {entry.file}: {entry.reason}" for entry in bad[:SHOWN]]
    more = f"\n       and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
    return "".join(lines) + more


def _warn(sentence: str) -> None:
    print(f"WARNING: {sentence}", file=sys.stderr, flush=True)
