"""Comparison of a dataset's samples with their source: images and captions, or rows of text."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from zerotrain.artifact import Artifact
from zerotrain.artifact.documents import read_bytes
from zerotrain.config.data import DataConfig
from zerotrain.config.image_source import ImageSourceConfig
from zerotrain.data.captions import prepare_captions
from zerotrain.data.conversation import TEXTS, Conversation
from zerotrain.data.dataset import IMAGES, Sample, caption_sha256
from zerotrain.data.dataset_folder import compute_identity, read_bad, read_samples
from zerotrain.data.digits import MD5, digits_file
from zerotrain.data.folder import find_tables
from zerotrain.data.listing import list_images
from zerotrain.data.metadata import NAMES
from zerotrain.data.open import open_source
from zerotrain.data.source import DIGITS, Found, Source
from zerotrain.data.text import is_table_name, read_conversations_of
from zerotrain.errors import PipelineError
from zerotrain.machine.ordered_pool import in_order
from zerotrain.run.lineage.chain import SHORT, ArtifactIndex, Finding, Node, Problem

WORKERS = 4
NOTHING = Found("", reason="none in the source")
"""In place of the entry of an image that its source does not name."""


def compare_source(dataset: Artifact, index: ArtifactIndex, *, damaged: bool = False) -> Node:
    """Compare every sample of a dataset with its source, and return the source.

    Args:
        dataset: A published dataset, of images or of text.
        index: The project, which relative paths of the source start from.
        damaged: Whether files of the dataset are not those that it lists: nothing is compared.
    """
    shown = index.display(dataset.folder)
    try:
        data = _config(dataset, index.root)
    except (ValueError, TypeError, KeyError, AttributeError):
        path = f"{shown}/manifest.json"
        wanted = "made_by.data, which says where samples come from"
        unknown = Finding("unknown", path, wanted, "none that can be read")
        return Node(path, "source", findings=[unknown])
    path = data.place if data.sources else index.display(Path(data.place))
    if data.source == "digits" and os.path.lexists(index.root / DIGITS):
        path = DIGITS.as_posix()
    facts: dict[str, Any] = {"source": data.source, "samples": 0}
    if damaged:
        note = f"{path}: not compared with the samples of {shown}, which are damaged"
        return Node(path, "source", facts=facts, notes=[note])
    try:
        if data.is_text:
            texts = read_samples(dataset, TEXTS)
            findings, notes = _check_text(texts, data, index)
            facts["samples"], made = len(texts), compute_identity(dataset, TEXTS, texts)
        else:
            images, bad = read_samples(dataset, IMAGES), [one["file"] for one in read_bad(dataset)]
            check = _check_sources if data.sources else _check_images
            findings, notes = check(images, bad, data, index)
            facts["samples"], made = len(images), compute_identity(dataset, IMAGES, images)
    except (PipelineError, KeyError, TypeError, ValueError, AttributeError):
        findings, notes = [Finding("unknown", f"{shown}/manifest.json", "samples", "no list")], []
    else:
        if made != dataset.identity:
            expected = f"the dataset {dataset.identity[:SHORT]}, as it says"
            findings.append(Finding("different", shown, expected, f"samples of {made[:SHORT]}"))
    return Node(path, "source", facts=facts, findings=findings, notes=notes)


def _config(dataset: Artifact, root: Path) -> DataConfig:
    """Return the dataset's section `data` without defaults; its paths start from the project."""
    recorded = dict(dataset.made_by["data"])
    fields = DataConfig.model_fields
    given = {key: value for key, value in recorded.items() if value != fields[key].default}
    for key in ("images", "metadata", "path", "mask_images"):
        if key in given:
            place = root / Path(given[key]).expanduser()
            on_hub = key == "path" and not os.path.exists(place) and not is_table_name(given[key])
            given[key] = given[key] if on_hub else str(place)
    if "sources" in given:
        given["sources"] = [_from_root(entry, root) for entry in given["sources"]]
    if folders := given.get("conditioning_images"):
        given["conditioning_images"] = [str(root / Path(one).expanduser()) for one in folders]
    return DataConfig(**given)


def _from_root(entry: dict[str, Any], root: Path) -> dict[str, Any]:
    """Return the keys of one of several sources; its paths start from the project."""
    paths = {key: entry[key] for key in ("images", "metadata", "mask_images") if entry.get(key)}
    return entry | {key: str(root / Path(path).expanduser()) for key, path in paths.items()}


def _check_text(
    samples: Sequence[Conversation], data: DataConfig, index: ArtifactIndex
) -> tuple[list[Finding], list[str]]:
    """Check that the source still has every conversation, at any position: rows may have moved."""
    path = index.display(Path(data.path or data.source))
    try:
        rows = read_conversations_of(data)
    except PipelineError as error:
        gone = bool(data.path and is_table_name(data.path) and not os.path.exists(data.path))
        problem: Problem = "different" if data.path and os.path.exists(data.path) else "missing"
        expected = f"the rows of {len(samples)} conversations"
        return [Finding(problem, path, expected, "nothing" if gone else error.what)], []
    there = {row.file: row.sha256 for row in rows if isinstance(row, Conversation)}
    known = {*there.values()}
    findings = [
        Finding(
            "different",
            f"{path}: {sample.file}",
            f"sha256 {sample.sha256[:SHORT]}",
            f"sha256 {there[sample.file][:SHORT]}" if sample.file in there else "no such row",
        )
        for sample in samples
        if sample.sha256 not in known
    ]
    more = len(known - {sample.sha256 for sample in samples})
    return findings, [f"{path}: {more} rows are not in the dataset"] if more else []


def _check_sources(
    samples: Sequence[Sample], bad: Sequence[str], data: DataConfig, index: ArtifactIndex
) -> tuple[list[Finding], list[str]]:
    """Check the samples of each of several sources."""
    findings, notes = [], []
    for part in data.sources or ():
        start = f"{part.name}/"
        own = [
            replace(sample, file=sample.file.removeprefix(start))
            for sample in samples
            if sample.file.startswith(start)
        ]
        own_bad = [file.removeprefix(start) for file in bad if file.startswith(start)]
        # Repeats may be a fraction, of a source alone; no image depends on them.
        keys = {*ImageSourceConfig.model_fields} - {"name", "repeats"}
        alone = DataConfig(**part.model_dump(include=keys))
        found, noted = _check_images(own, own_bad, alone, index)
        findings += found
        notes += noted
    return findings, notes


def _check_images(
    samples: Sequence[Sample], bad: Sequence[str], data: DataConfig, index: ArtifactIndex
) -> tuple[list[Finding], list[str]]:
    """Check every image, conditioning image and caption by its hash."""
    source = open_source(data)
    if data.source == "digits" and (wrong := _check_digits_file(index)):
        return [wrong], []
    if data.is_on_hub:
        try:
            source.found()
        except PipelineError as error:
            expected = f"a dataset of {len(samples)} images"
            return [Finding("missing", source.name, expected, error.what)], []
    if data.has_image_files and not os.path.isdir(str(data.images)):
        path = index.display(Path(str(data.images)))
        return [Finding("missing", path, f"a folder of {len(samples)} images", "no folder")], []

    def name(file: str) -> str:
        return index.display(Path(data.images) / file) if data.images else f"{source.name}: {file}"

    def check(sample: Sample) -> Finding | None:
        return _check_image(sample.file, sample.image_sha256, source, name(sample.file))

    checked = list(zip(samples, in_order(check, samples, WORKERS), strict=True))
    findings = [found for _, found in checked if found]
    there = [sample for sample, found in checked if not found or found.problem != "missing"]
    findings += _check_conditioning(samples, source, index)
    findings += _check_masks(samples, source, index)
    if there:
        findings += _check_captions(there, data, source, index)
    return findings, _notes(samples, bad, data, index)


def _check_conditioning(
    samples: Sequence[Sample], source: Source, index: ArtifactIndex
) -> list[Finding]:
    """Check the conditioning images, which several samples may share."""
    places = {
        (source.conditioning_source(position).name, image.file): (position, image)
        for sample in samples
        for position, image in enumerate(sample.conditioning)
    }

    def check(place: tuple[str, str]) -> Finding | None:
        position, image = places[place]
        there, shown = source.conditioning_source(position), index.display(Path(*place))
        return _check_image(image.file, image.image_sha256, there, shown)

    return [found for found in in_order(check, [*places], WORKERS) if found]


def _check_masks(samples: Sequence[Sample], source: Source, index: ArtifactIndex) -> list[Finding]:
    """Check the loss masks that are files of their own."""

    def check(named: tuple[str, str, str]) -> Finding | None:
        file, mask, sha256 = named
        masks = source.mask_source(file)
        return _check_image(mask, sha256, masks, index.display(Path(masks.name, mask)))

    masked = [
        (sample.file, sample.mask, sample.mask_sha256)
        for sample in samples
        if sample.mask is not None and sample.mask_sha256 is not None
    ]
    return [found for found in in_order(check, masked, WORKERS) if found]


def _check_digits_file(index: ArtifactIndex) -> Finding | None:
    """Check the example's file, or scikit-learn's if the project never had one."""
    file = index.root / DIGITS
    if not os.path.lexists(file) and not os.path.exists(f"{file}.dvc"):
        file = digits_file()

    def digest() -> str:
        return hashlib.md5(read_bytes(file, follow_links=True), usedforsecurity=False).hexdigest()

    return _compare("md5", digest, MD5, index.display(file))


def _check_image(file: str, sha256: str, source: Source, shown: str) -> Finding | None:
    return _compare("sha256", lambda: source.sha256(file), sha256, shown)


def _compare(kind: str, digest: Callable[[], str], wanted: str, shown: str) -> Finding | None:
    expected = f"{kind} {wanted[:SHORT]}"
    try:
        found = digest()
    except OSError as error:
        what = "nothing" if isinstance(error, FileNotFoundError) else str(error.strerror)
        return Finding("missing", shown, expected, what)
    if found == wanted:
        return None
    return Finding("different", shown, expected, f"{kind} {found[:SHORT]}")


def _check_captions(
    samples: Sequence[Sample], data: DataConfig, source: Source, index: ArtifactIndex
) -> list[Finding]:
    """Check the captions of images that are there."""
    if data.source == "folder":  # conditioning images and masks are checked by themselves
        others = ("conditioning_images", "conditioning_columns", "mask_images")
        source = open_source(data.model_copy(update=dict.fromkeys(others)))
    try:
        # Of several entries of an image, the first is the usable one.
        entries = {entry.file: entry for entry in reversed(source.found())}
        places = _caption_places(samples, data, source)
    except PipelineError as error:
        table = index.display(Path(data.metadata or str(data.images)))
        return [Finding("missing", table, f"the captions of {len(samples)} images", error.what)]
    findings = []
    for sample in samples:
        entry, place = entries.get(sample.file, NOTHING), places[sample.file]
        made = prepare_captions(entry, data, sample.split)
        first = caption_sha256(made[0]) if made else None
        if (first, made[1:]) == (sample.caption_sha256, sample.other_captions):
            continue
        gone = entry.reason and not os.path.lexists(place)
        problem: Problem = "missing" if gone else "different"
        shown = place if data.source == "digits" else index.display(Path(place))
        expected = f"the caption {_cut(sample.caption)}"
        findings.append(Finding(problem, shown, expected, entry.reason or _cut(entry.caption)))
    return findings


def _caption_places(samples: Sequence[Sample], data: DataConfig, source: Source) -> dict[str, str]:
    """Return the path of each image's caption file, or its table with the image."""
    files = [sample.file for sample in samples]
    if data.source != "folder" or data.caption_strategy != "textfile":
        return {file: f"{source.name}: {file}" for file in files}
    root, listing = Path(str(data.images)), list_images(data)
    if tables := find_tables(data, listing):

        def table_of(file: str) -> Path:
            return max(tables, key=lambda table: (root / file).is_relative_to(table.parent))

        return {file: f"{table_of(file)}: {file}" for file in files}
    extension = data.caption_extension
    if not listing.captions and len(files) > 1 and not data.folder_repeats:
        what = f"no *{extension} next to them, nor {' or '.join(NAMES)}"
        raise PipelineError(what, hint="bring them back")
    stems = {file: os.path.splitext(file)[0] for file in files}
    return {f: str(root / listing.captions.get(s, s + extension)) for f, s in stems.items()}


def _notes(
    samples: Sequence[Sample], bad: Sequence[str], data: DataConfig, index: ArtifactIndex
) -> list[str]:
    """List images that were added later and are not in the dataset."""
    if data.source != "folder":
        return []
    known = {*bad, *(sample.file for sample in samples)}
    if data.conditioning_columns:
        known |= {image.file for sample in samples for image in sample.conditioning}
    try:
        more = {*list_images(data).images} - known
    except PipelineError:
        return []
    root = index.display(Path(str(data.images)))
    named = f", such as {min(more)}" if more else ""
    return [f"{root}: {len(more)} images are not in the dataset{named}"] if more else []


def _cut(caption: str) -> str:
    return repr(caption if len(caption) <= 60 else caption[:57] + "...")
