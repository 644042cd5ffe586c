"""SimpleTuner's multidatabackend.json, as far as the section `data` supports it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zerotrain.artifact.documents import DocumentError, parse_json
from zerotrain.data.source import exact_share
from zerotrain.errors import PipelineError
from zerotrain.importers.files import load_text
from zerotrain.importers.imported_config import (
    ImportedConfig,
    Outcome,
    put_resolutions,
    source_names,
    source_prefixes,
)
from zerotrain.importers.key_values import put_row, put_rows, read_keys
from zerotrain.importers.keys import OWN_CACHE, SIMPLETUNER_DATASET
from zerotrain.importers.simpletuner_captions import filters_by_dataset, put_captions, put_filters

NAME = "data_backend_config"
EMBEDS = ("text_embeds", "image_embeds", "conditioning_image_embeds")
HUB = "data/{}"
PARTS_OF_HUB = ("split", "revision")
"""Keys that choose what is loaded from the hub."""
COLUMNS = ("image_column", "caption_column")
FRAMING = (
    "the square at the centre of each image is trained on, so images that are no squares are "
    "framed otherwise"
)
BUCKETED = (
    "images keep about their shape, and what does not fit it is cut; the sizes of the buckets are "
    "computed in another way"
)
MIXED = "a step has images of all datasets of one size; SimpleTuner takes each batch from one"
MOST_PIXELS = 2**16


def is_backends(path: Path) -> bool:
    """Return whether a file begins as a list of datasets does."""
    try:
        return re.match(r"\s*\[\s*\{", load_text(path)) is not None
    except (OSError, DocumentError):
        return False


def read_backends(path: Path, result: ImportedConfig) -> list[dict[str, Any]]:
    """Return the keys of each image dataset in a file, and note the others.

    Raises:
        PipelineError: it is not a JSON list, or has no image dataset.
    """
    found = parse_json(load_text(path), path, hint="name a file that holds a list of datasets")
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise PipelineError(f"{path}: holds no list of datasets", hint="see DATALOADER.md")
    filters = filters_by_dataset(found, path)
    images = []
    for entry in found:
        kind = entry.get("dataset_type", "image")
        if kind in EMBEDS or entry.get("disabled", entry.get("disable")) is True:
            result.ignore(f"{NAME}: {entry.get('id')}", kind, OWN_CACHE)
        else:
            images.append(entry)
    if not images:
        raise PipelineError(
            f"{path}: no dataset of images is trained on", hint="all are disabled, or of embeddings"
        )
    datasets = []
    for entry in images:
        flat = read_keys({NAME: entry}, SIMPLETUNER_DATASET, str(path), result)
        own = {key.removeprefix(f"{NAME}."): value for key, value in flat.items()}
        embeds = entry.get("text_embeds")
        own["filters"] = filters.get(None if embeds is None else str(embeds), [])
        datasets.append({**own, "id": str(entry.get("id") or "images")})
    return datasets


def is_local(dataset_name: str) -> bool:
    """Return whether the name of a dataset is a path of this machine, rather than a hub id."""
    return dataset_name.startswith((".", "/", "~"))


def put_datasets(datasets: Sequence[dict[str, Any]], result: ImportedConfig) -> None:
    """Set `data` and the resolutions, those of the datasets that have one.

    Raises:
        PipelineError: a kind of dataset or captions is not supported, or two differ in what they
            have to share.
    """
    names = source_names([found["id"] for found in datasets])
    prefixes = source_prefixes(names, several=len(datasets) > 1, result=result)
    if len(datasets) > 1:
        result.note("changed", NAME, None, MIXED, "data.sources")
    for found, prefix in zip(datasets, prefixes, strict=True):
        _put_dataset(found, prefix, result)
        result.attempt(_put_repeats, found, prefix, result, several=len(datasets) > 1)
    with result.collect():
        _put_resolutions(datasets, prefixes, result)
    with result.collect():
        if len({_keeps_shape(found) for found in datasets}) > 1:
            kept = next(found["id"] for found in datasets if _keeps_shape(found))
            raise PipelineError(
                f"{NAME}: images of {kept} keep their shape, and those of others are squares",
                hint="give all datasets the same crop and crop_aspect",
            )
        for found in datasets:
            put_framing(found, result)


def _put_resolutions(
    datasets: Sequence[Mapping[str, Any]], prefixes: Sequence[str], result: ImportedConfig
) -> None:
    """Set train.resolution, and the resolutions of smaller datasets."""
    given = [found["resolution"] for found in datasets if "resolution" in found]
    kinds = [found.get("resolution_type", "pixel_area") for found in datasets]
    key = f"{NAME}.resolution"
    if len(datasets) == 1 and given:
        put_resolution(key, given[0], kinds[0], result)
    elif len(given) == len(datasets):
        sides = [side_of(key, one, kind) for one, kind in zip(given, kinds, strict=True)]
        put_resolutions(key, sides, prefixes, result)
    elif given:
        lacking = next(found["id"] for found in datasets if "resolution" not in found)
        raise PipelineError(f"{key} is missing in {lacking}", hint="give it to each dataset")


def _put_dataset(found: Mapping[str, Any], at: str, result: ImportedConfig) -> None:
    result.attempt(_put_images, found, result, at)
    result.attempt(put_captions, found, result, f"{NAME}.", at)
    result.attempt(put_filters, found.get("filters", ()), result, f"{NAME}.", at)
    names = ["maximum_image_size", "target_downsample_size"]
    names += ["minimum_image_size"] if found.get("minimum_image_size") else []
    put_rows({**found}, SIMPLETUNER_DATASET, result, *names, prefix=f"{NAME}.")


def _put_repeats(
    found: Mapping[str, Any], at: str, result: ImportedConfig, *, several: bool
) -> None:
    """Set how often an epoch has each image: repeats, of several datasets times probability.

    SimpleTuner draws datasets by probability times their size, so that the shares are those.

    Raises:
        PipelineError: the probability is not above 0.
    """
    repeats, weight = found.get("repeats", 0) + 1, found.get("probability", 1)
    if weight <= 0:
        raise PipelineError(
            f"{NAME}.probability is {weight:g} in {found['id']}",
            hint="disabled: true leaves it out",
        )
    if not several and "probability" in found:
        result.ignore(f"{NAME}.probability", weight, "there is one dataset")
        weight = 1
    exact = exact_share(repeats) * exact_share(weight)
    rate = int(exact) if exact.denominator == 1 else float(exact)
    if "repeats" in found:
        reason = "an epoch sees each image once more than that"
        reason += ", times probability" if weight != 1 else ""
        result.keep(f"{NAME}.repeats", found["repeats"], f"{at}repeats", rate, reason)
    if weight != 1:
        result.put(
            "changed", f"{NAME}.probability", weight, f"{at}repeats", rate,
            "the share of an epoch; there datasets are drawn at random",
        )  # fmt: skip
    elif several and "probability" in found:
        result.note("kept", f"{NAME}.probability", weight, "", f"{at}repeats")


def _keeps_shape(found: Mapping[str, Any]) -> bool:
    return not found.get("crop", True) or found.get("crop_aspect", "square") != "square"


def put_framing(found: Mapping[str, Any], result: ImportedConfig) -> None:
    """Set squares, or aspect buckets where SimpleTuner keeps the shape of images."""
    crops = [name for name in ("crop", "crop_style", "crop_aspect") if name in found]
    named = {name: f"{NAME}.{name}" for name in ("crop", *crops)}
    cut, centred = found.get("crop", True), found.get("crop_style") == "center"
    if _keeps_shape(found):
        how = "center" if centred or not cut else "random"
        decides = "crop_aspect" if cut else "crop"
        result.put(
            "changed", named[decides], found[decides], "data.aspect_buckets.crop", how, BUCKETED
        )
        for name in crops:
            same = not cut or found[name] in (True, "center", "random")
            if name != decides:
                outcome: Outcome = "kept" if same else "changed"
                reason = "" if same else "a part that is drawn once"
                key = "data.aspect_buckets.crop"
                result.note(outcome, named[name], found[name], reason, key)
        return
    for name in crops:
        if found[name] in (True, "center", "square"):
            result.note("kept", named[name], found[name], "", "train.resolution")
        else:
            result.note("changed", named[name], found[name], FRAMING)
    if not crops:
        result.note("changed", named["crop"], None, FRAMING)


def _put_images(found: Mapping[str, Any], result: ImportedConfig, at: str) -> None:
    kind = found.get("type")
    if kind == "local" and "instance_data_dir" in found:
        put_row(
            SIMPLETUNER_DATASET[f"{NAME}.instance_data_dir"], found["instance_data_dir"], result, at
        )
        result.note("kept", f"{NAME}.type", kind, "", "data.source")
    elif kind == "huggingface" and "dataset_name" in found:
        put_row(SIMPLETUNER_DATASET[f"{NAME}.type"], kind, result, at)
        _put_hub_dataset(found, result, at)
    else:
        raise PipelineError(
            f"{NAME}.type is {kind}", hint="local with instance_data_dir, or huggingface"
        )
    result.values.setdefault("data.source", "folder")


def _put_hub_dataset(found: Mapping[str, Any], result: ImportedConfig, at: str) -> None:
    """Set a dataset of the hub and its columns; one of several is brought to a folder first.

    Raises:
        PipelineError: captions are not those of one column, or rows or parts of images are chosen.
    """
    name = found["dataset_name"]
    if is_local(name):
        result.keep(f"{NAME}.dataset_name", name, f"{at}images")
        for key in (key for key in PARTS_OF_HUB if key in found):
            reason = f"every row in {name} is trained on"
            result.note("changed", f"{NAME}.{key}", found[key], reason)
    elif at == "data.":
        put_rows(
            {**found}, SIMPLETUNER_DATASET, result, "dataset_name", *PARTS_OF_HUB, prefix=f"{NAME}."
        )
    else:
        chosen = {key: found[key] for key in PARTS_OF_HUB if key in found}
        call = {"split": "train"} | chosen
        words = "".join(f", {key}={value!r}" for key, value in call.items())
        # Two parts of one dataset, or equal names of two owners, are two folders.
        folder = HUB.format("-".join(map(str, (name, *chosen.values()))).replace("/", "-"))
        result.put(
            "changed", f"{NAME}.dataset_name", name, f"{at}images", folder,
            f"bring it there: datasets.load_dataset({name!r}{words}).save_to_disk({folder!r})",
        )  # fmt: skip
    options = found.get("huggingface") or {}
    if not isinstance(options, dict):
        raise PipelineError(f"{NAME}.huggingface is {options!r}", hint="write its keys below it")
    columns = {key: options[key] for key in COLUMNS if key in options}
    columns |= {key: found[key] for key in COLUMNS if key in found}
    if others := sorted({*options} - {*COLUMNS, "width_column", "height_column"}):
        raise PipelineError(
            f"{NAME}.huggingface.{others[0]}: every row of {name} is trained on, with one column "
            "of captions",
            hint="choose and change rows, save them with save_to_disk of the package datasets, and "
            "take the key out",
        )
    if "caption_column" not in columns and found.get("caption_strategy") != "instanceprompt":
        result.assume(f"{at}caption_column", "caption", "SimpleTuner's default")
    for key, column in columns.items():
        if not isinstance(column, str) or "." in column:
            raise PipelineError(
                f"{NAME}.{key} is {column!r}", hint="name one column, and no part of it"
            )
        result.keep(f"{NAME}.{key}", column, f"{at}{key}")


def put_resolution(key: str, given: float, kind: str, result: ImportedConfig) -> None:
    """Set the side of the trained square.

    Args:
        key: Name of the value in messages.
        given: As for side_of.
        kind: As for side_of.
        result: Receives train.resolution.

    Raises:
        PipelineError: the kind or size is invalid.
    """
    side = side_of(key, given, kind)
    reason = "an area in megapixels: the side of its square" if _is_area(given, kind) else ""
    result.keep(key, given, "train.resolution", side, reason)


def _is_area(given: float, kind: str) -> bool:
    return kind == "area" or 0 < given < 8


def side_of(key: str, given: float, kind: str) -> int:
    """Return the side of a square in pixels.

    Args:
        key: Name of the value in messages.
        given: A side in pixels; megapixels if it is below 8, as for `area`.
        kind: pixel (the shorter side), pixel_area (the side of a square of that area) or area.

    Raises:
        PipelineError: the kind or size is invalid.
    """
    if kind not in ("pixel", "pixel_area", "area"):
        raise PipelineError(f"{key}: resolution_type is {kind}", hint="pixel, pixel_area or area")
    area = int(math.sqrt(max(given, 0)) * 1024)  # the product below the root can be infinite
    side = (area if _is_area(given, kind) else int(given)) // 8 * 8
    if not 8 <= side <= MOST_PIXELS:
        hint = f"give a side of 8 to {MOST_PIXELS:,} pixels"
        raise PipelineError(f"{key} is {given:g}", hint=hint)
    return side
