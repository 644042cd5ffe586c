"""`zerotrain data show`: the figures of a run's dataset, and a contact sheet of its images."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerotrain import artifact
from zerotrain.artifact import replacing
from zerotrain.artifact.documents import LeftOut
from zerotrain.artifact.layout import DataFolder, RunFolder
from zerotrain.config.data import DataConfig
from zerotrain.config.run import RunConfig
from zerotrain.data.captions import prepare_captions
from zerotrain.data.conversation import Conversation, count_keys, read_conversations
from zerotrain.data.dataset import KIND, Sample, read_dataset
from zerotrain.data.dataset_folder import read_bad, read_left_out
from zerotrain.data.figures import Row, format_sections, image_sections, text_sections
from zerotrain.data.image_summary import perceptual_hash
from zerotrain.data.open import open_source
from zerotrain.data.sheets import MOST, Picture, draw_sheet, reduce
from zerotrain.data.source import Found, Source
from zerotrain.data.text import read_conversations_of
from zerotrain.errors import PipelineError
from zerotrain.evaluation.results import spread
from zerotrain.machine.disk_errors import check_writable
from zerotrain.machine.ordered_pool import in_order
from zerotrain.machine.progress_bar import progress

if TYPE_CHECKING:
    from PIL.Image import Image

SHEET = "contact-sheet.png"
SETTINGS_LEFT_OUT = {"name", "num_workers", "max_bad_samples"}
"""Values of `data` that a manifest does not record."""
LONGER_THAN_ANY_LIMIT = "word " * 4096
Check = Callable[[Source, DataConfig], Iterable[Sample | Found]]
"""What prepare_dataset does with a source's images (stages are above this package)."""


@dataclass
class Look:
    """A dataset as it is now."""

    origin: str
    """Where its samples were read."""
    images: Sequence[Sample] = ()
    texts: Sequence[Conversation] = ()
    bad: list[Mapping[str, str]] = field(default_factory=list)
    left_out: LeftOut = field(default_factory=LeftOut)
    """The names of the source that are not used."""
    hashes: dict[str, int] = field(default_factory=dict)
    """Perceptual hash of an image by its sha256."""
    pictures: list[Picture] = field(default_factory=list)

    @property
    def problem(self) -> str | None:
        """Return why prepare_dataset leaves nothing to train on; None if it does not."""
        splits = {one.split for one in self.images} | {one.split for one in self.texts}
        if not splits:
            return "no usable sample"
        return None if "train" in splits else "data.holdout keeps every sample from training"


def show_data(run: RunConfig, check: Check, output: Path | None = None) -> int:
    """Print the figures of a run's dataset, and write a contact sheet of its images.

    Images are read and not changed.

    Args:
        run: The run.
        check: Checks the images of a source, as prepare_dataset does.
        output: Folder of the contact sheet; by default results/data/NAME/show.

    Returns:
        The exit code: 1 if prepare_dataset refuses the dataset.

    Raises:
        PipelineError: the source cannot be used.
    """
    output = output or DataFolder(run.data_name).path / "show"
    if run.data.is_text:
        look = _look_at_text(run)
        unused = [*look.left_out.rows(), *_unused_keys(run, look.texts)]
        sections = text_sections(look.texts, look.bad, unused)
    else:
        check_writable(output)
        look = _look_at_images(run, check)
        sections = image_sections(
            look.images,
            look.bad,
            resolution=max(phase.train.resolution for phase in run.phases),
            buckets=run.data.aspect_buckets,
            own=run.data.resolutions,
            hashes=look.hashes,
            tokens=[*_tokens(run, [sample.caption for sample in look.images])],
            left_out=[*look.left_out.rows()],
        )
    print(f"{look.origin}\n")
    for line in format_sections(sections):
        print(line)
    if look.pictures:
        with replacing(output / SHEET) as new:
            draw_sheet(look.pictures).save(new, format="PNG")
        print(f"\ncontact sheet: {output / SHEET}, {len(look.pictures)} of {len(look.images):,}")
    refused = look.problem
    if len(look.bad) > run.data.max_bad_samples:
        refused = (
            f"{len(look.bad):,} bad samples, and data.max_bad_samples allows "
            f"{run.data.max_bad_samples:,}"
        )
    if refused:
        print(f"\nprepare_dataset refuses this dataset: {refused}")
    return 1 if refused else 0


def _look_at_images(run: RunConfig, check: Check) -> Look:
    """Return the prepared samples if the source still has them, else those of the source."""
    source, folder = open_source(run.data), DataFolder(run.data_name).path
    stale = "the dataset is not prepared yet"
    if artifact.is_published(folder):
        stale = f"{folder} is not what the source has now"
        prepared = artifact.read(folder, KIND, verify=False)
        if _has_settings(prepared, run.data):
            samples, bad = read_dataset(folder).samples, read_bad(prepared)
            if _lists(source, run.data, samples, bad):
                look = Look(f"{source.name}, as {folder} has it", samples, bad=[*bad])
                look.left_out = source.left_out
                try:
                    _read_pixels(look, source, run.data.num_workers)
                except PipelineError as error:
                    stale = error.what
                else:
                    return look
    look = Look(f"{source.name}; {stale}")
    checked = [*check(source, run.data)]
    look.images = [one for one in checked if isinstance(one, Sample)]
    look.bad, look.left_out = _bad(checked), source.left_out
    _read_pixels(look, source, run.data.num_workers)
    return look


def _look_at_text(run: RunConfig) -> Look:
    """Return the examples of the source, or those that are prepared if it is not here."""
    name, folder = run.data.path or run.data.source, DataFolder(run.data_name).path
    left_out = LeftOut()
    try:
        checked = read_conversations_of(run.data, left_out)
    except PipelineError:
        if not artifact.is_published(folder):
            raise
        found = read_conversations(folder)
        if not _has_settings(found.artifact, run.data):
            raise
        return Look(
            f"{folder}; {name} cannot be read now",
            texts=found.samples,
            bad=[*read_bad(found.artifact)],
            left_out=read_left_out(found.artifact),
        )
    texts = [one for one in checked if isinstance(one, Conversation)]
    return Look(name, texts=texts, bad=_bad(checked), left_out=left_out)


def _bad(checked: Iterable[object]) -> list[Mapping[str, str]]:
    return [
        {"file": one.file, "reason": one.reason or ""} for one in checked if isinstance(one, Found)
    ]


def _has_settings(dataset: artifact.Artifact, data: DataConfig) -> bool:
    """Return whether a dataset was made with these values."""
    values: dict[str, Any] = data.model_dump(mode="json", exclude=SETTINGS_LEFT_OUT)
    return bool(dataset.made_by.get("data") == values)


def _lists(
    source: Source, data: DataConfig, samples: Sequence[Sample], bad: Sequence[Mapping[str, str]]
) -> bool:
    """Return whether a source has these files and captions, without reading pixels."""
    found = {entry.file: entry for entry in source.found()}
    return found.keys() == {*(one.file for one in samples), *(one["file"] for one in bad)} and all(
        prepare_captions(found[one.file], data.part_of(one.file), one.split) == one.captions
        for one in samples
    )


def _read_pixels(look: Look, source: Source, num_workers: int) -> None:
    """Hash each different image once, and keep small pictures of those on the contact sheet.

    Raises:
        PipelineError: an image changed after its sample was listed, or cannot be read.
    """
    shown = {sample.image_sha256 for sample in spread(look.images, MOST)}
    distinct = {sample.image_sha256: sample for sample in look.images}

    def read(sample: Sample) -> tuple[str, int, Image | None]:
        image = source.image_of(sample.file, sample.image_sha256)
        small = reduce(image) if sample.image_sha256 in shown else None
        return sample.image_sha256, perceptual_hash(image), small

    pixels = in_order(read, distinct.values(), num_workers)
    small = {}
    for sha256, found, picture in progress(pixels, len(distinct), "looking at images", "image"):
        look.hashes[sha256] = found
        if picture is not None:
            small[sha256] = picture
    look.pictures = [
        Picture(sample.file, sample.caption, small[sample.image_sha256])
        for sample in spread(look.images, MOST)
    ]


def _base(run: RunConfig, part: str) -> Path | None:
    """Return the folder of a run's base; None if no folder has it, or this part of it, yet."""
    folders = (
        DataFolder(run.data_name).base,
        RunFolder(run.data_name).base,
        RunFolder(run.run).base,
        Path(run.base).expanduser(),
    )
    return next(
        (one for one in folders if artifact.is_published(one) or (one / part).exists()), None
    )


def _unused_keys(run: RunConfig, texts: Sequence[Conversation]) -> Iterator[Row]:
    """Yield a row for each key of turns that the base's chat template does not take."""
    counts = count_keys(texts)
    base = _base(run, "tokenizer_config.json") if counts else None
    if base is None:
        return
    from zerotrain.models.families import load_family

    family = load_family(run.family)
    assert family.modality == "text"
    for key in family.unused_keys(family.load_tokenizer(base)):
        if count := counts[key]:
            turns = f"{count:,} turn{'s' * (count != 1)}"
            yield key, f"{turns}: the chat template does not take it"


def _tokens(run: RunConfig, captions: Sequence[str]) -> Iterator[Row]:
    """Yield a row for each limit of the base's text encoders; none without a base's tokenizers."""
    base = _base(run, "tokenizer")
    if base is None or not captions:
        return
    from zerotrain.data.figures import describe_lengths
    from zerotrain.models.families import load_family

    family = load_family(run.family)
    assert family.modality == "image"
    # A family lists the limits that some caption exceeds: with this one, all of them.
    given = [*captions, LONGER_THAN_ANY_LIMIT]
    print("counting tokens", file=sys.stderr)
    for limit in family.caption_limits(base, given, run.cache.max_sequence_length):
        counts = limit.counts[:-1]
        value = (
            f"{describe_lengths(counts)}; {limit.limit} read by {' and '.join(limit.tokenizers)}"
        )
        if cut := [count - limit.limit for count in counts if count > limit.limit]:
            long = run.phases[0].train.long_captions
            done = "read in chunks" if long == "chunk" else f"cut, by up to {max(cut):,}"
            value += f": {len(cut):,} of {len(counts):,} captions are {done}"
        yield "tokens", value
