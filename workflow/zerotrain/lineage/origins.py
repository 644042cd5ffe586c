"""A dataset held to what it was made from: images and captions, or rows of text."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from zerotrain.artifact import Artifact
from zerotrain.config import DataConfig
from zerotrain.data import metadata
from zerotrain.data.conversation import Conversation
from zerotrain.data.dataset import caption_sha256
from zerotrain.data.digits import MD5, digits_file
from zerotrain.data.folder import list_folder
from zerotrain.data.source import DIGITS, Source, open_source
from zerotrain.data.text import read_conversations_of
from zerotrain.errors import PipelineError
from zerotrain.lineage.shelf import Shelf
from zerotrain.lineage.verify import SHORT, Finding, Problem
from zerotrain.workers import in_order

Checked = tuple[str, dict[str, Any], list[Finding], list[str]]
"""The source's path, its facts, findings and notes."""
WORKERS = 4


def check_origins(dataset: Artifact, shelf: Shelf) -> Checked:
    """Hold every sample of a dataset to its source.

    Args:
        dataset: A published dataset, of images or of text.
        shelf: The project, from which relative paths of the source count.
    """
    shown = shelf.shown(dataset.folder)
    try:
        data = _config(dataset, shelf.root)
    except (ValueError, TypeError, KeyError, AttributeError):
        path = f"{shown}/manifest.json"
        wanted = "made_by.data, which says where samples come from"
        return path, {}, [Finding("unknown", path, wanted, "none that can be read")], []
    path = shelf.shown(Path(data.images or data.path or data.source))
    if data.source == "digits" and os.path.lexists(shelf.root / DIGITS):
        path = DIGITS.as_posix()
    try:
        check = _check_text if data.is_text else _check_images
        findings, notes = check(dataset.content, data, shelf)
    except (KeyError, TypeError, AttributeError):
        findings, notes = [Finding("unknown", f"{shown}/manifest.json", "samples", "no list")], []
    samples = len(dataset.content.get("samples") or dataset.content.get("conversations") or ())
    return path, {"source": data.source, "samples": samples}, findings, notes


def _config(dataset: Artifact, root: Path) -> DataConfig:
    """The section `data` as it was, of what is not as by default; paths from the project."""
    said = dict(dataset.made_by["data"])
    fields = DataConfig.model_fields
    given = {key: value for key, value in said.items() if value != fields[key].default}
    for key in ("images", "metadata", "path"):
        if key in given:
            place = root / Path(given[key]).expanduser()
            hub_id = key == "path" and not os.path.exists(place) and not Path(given[key]).suffix
            given[key] = given[key] if hub_id else str(place)
    return DataConfig(**given)


def _check_text(
    content: dict[str, Any], data: DataConfig, shelf: Shelf
) -> tuple[list[Finding], list[str]]:
    """Every conversation is still in the source, wherever in it: rows may have moved."""
    samples = content["conversations"]
    path = shelf.shown(Path(data.path or data.source))
    try:
        rows = read_conversations_of(data)
    except PipelineError as error:
        gone = bool(data.path and Path(data.path).suffix and not os.path.exists(data.path))
        problem: Problem = "different" if data.path and os.path.exists(data.path) else "missing"
        expected = f"the rows of {len(samples)} conversations"
        return [Finding(problem, path, expected, "nothing" if gone else error.what)], []
    there = {row.file: row.sha256 for row in rows if isinstance(row, Conversation)}
    known = {*there.values()}
    findings = [
        Finding(
            "different",
            f"{path}: {sample['file']}",
            f"sha256 {sample['sha256'][:SHORT]}",
            f"sha256 {there[sample['file']][:SHORT]}" if sample["file"] in there else "no such row",
        )
        for sample in samples
        if sample["sha256"] not in known
    ]
    more = len(known - {sample["sha256"] for sample in samples})
    return findings, [f"{path}: {more} rows are not in the dataset"] if more else []


def _check_images(
    content: dict[str, Any], data: DataConfig, shelf: Shelf
) -> tuple[list[Finding], list[str]]:
    """Every image by its hash, and every caption by its own."""
    samples, source = content["samples"], open_source(data)
    if data.source == "digits" and (wrong := _check_digits_file(shelf)):
        return [wrong], []
    if data.source == "folder" and not os.path.isdir(str(data.images)):
        path = shelf.shown(Path(str(data.images)))
        return [Finding("missing", path, f"a folder of {len(samples)} images", "no folder")], []

    def name(file: str) -> str:
        return shelf.shown(Path(data.images) / file) if data.images else f"{source.name}: {file}"

    def check(sample: dict[str, Any]) -> Finding | None:
        return _check_image(sample, source, name(sample["file"]))

    findings = [found for found in in_order(check, samples, WORKERS) if found]
    try:
        captions = _captions(data, source, [sample["file"] for sample in samples])
    except PipelineError as error:
        table = shelf.shown(Path(data.metadata or str(data.images)))
        expected = f"the captions of {len(samples)} images"
        return [*findings, Finding("missing", table, expected, error.what)], []
    for sample in samples:
        place, caption = captions[sample["file"]]
        if caption is not None and caption_sha256(caption) == sample["caption_sha256"]:
            continue
        problem: Problem = "missing" if caption is None else "different"
        shown = place if data.source == "digits" else shelf.shown(Path(place))
        expected = f"the caption {_cut(sample['caption'])}"
        findings.append(Finding(problem, shown, expected, _cut(caption) if caption else "none"))
    return findings, _notes(content, data, shelf)


def _check_digits_file(shelf: Shelf) -> Finding | None:
    """The example's file; scikit-learn's own where the project, as DVC has it, never had one."""
    file = shelf.root / DIGITS
    if not os.path.lexists(file) and not os.path.exists(f"{file}.dvc"):
        file = digits_file()
    shown, expected = shelf.shown(file), f"md5 {MD5[:SHORT]}"
    try:
        found = hashlib.md5(file.read_bytes(), usedforsecurity=False).hexdigest()
    except OSError as error:
        what = "nothing" if isinstance(error, FileNotFoundError) else str(error.strerror)
        return Finding("missing", shown, expected, what)
    if found == MD5:
        return None
    return Finding("different", shown, expected, f"md5 {found[:SHORT]}")


def _check_image(sample: dict[str, Any], source: Source, shown: str) -> Finding | None:
    expected = f"sha256 {sample['image_sha256'][:SHORT]}"
    try:
        found = source.sha256(sample["file"])
    except OSError as error:
        what = "nothing" if isinstance(error, FileNotFoundError) else str(error.strerror)
        return Finding("missing", shown, expected, what)
    if found == sample["image_sha256"]:
        return None
    return Finding("different", shown, expected, f"sha256 {found[:SHORT]}")


def _captions(
    data: DataConfig, source: Source, files: list[str]
) -> dict[str, tuple[str, str | None]]:
    """Of each image where its caption stands, and the caption; None where there is none.

    Raises:
        PipelineError: nothing that holds captions is there.
    """
    if data.source == "digits":
        known = {found.file: found.caption for found in source.found()}
        return {file: (f"digits: {file}", known.get(file)) for file in files}
    root = Path(str(data.images))
    tables = [Path(data.metadata)] if data.metadata else [root / name for name in metadata.NAMES]
    for table in tables:
        if data.metadata and not os.path.isfile(table):
            raise PipelineError("nothing", hint="bring the table back")
        if os.path.isfile(table):
            rows = metadata.read_metadata(table, root, {*files})
            known = {row.file: row.caption for row in rows if not row.reason}
            return {file: (f"{table}: {file}", known.get(file)) for file in files}
    try:
        listed = list_folder(data).captions
    except PipelineError:
        listed = {}
    if not listed and len(files) > 1:
        what = f"no *{data.caption_extension} beside them, nor {' or '.join(metadata.NAMES)}"
        raise PipelineError(what, hint="bring them back")
    stems = {file: os.path.splitext(file)[0] for file in files}
    names = {file: listed.get(stem, stem + data.caption_extension) for file, stem in stems.items()}
    return {file: (str(root / name), _text(root / name)) for file, name in names.items()}


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8-sig").strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError):
        return "what cannot be read"


def _notes(content: dict[str, Any], data: DataConfig, shelf: Shelf) -> list[str]:
    """Images that came later are no part of the chain."""
    if data.source != "folder":
        return []
    known = {sample["file"] for sample in [*content["samples"], *content.get("bad", ())]}
    try:
        more = {*list_folder(data).images} - known
    except PipelineError:
        return []
    root = shelf.shown(Path(str(data.images)))
    named = f", such as {min(more)}" if more else ""
    return [f"{root}: {len(more)} images are not in the dataset{named}"] if more else []


def _cut(caption: str) -> str:
    return repr(caption if len(caption) <= 60 else caption[:57] + "...")
