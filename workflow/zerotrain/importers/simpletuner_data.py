"""SimpleTuner's multidatabackend.json, as far as the section `data` supports it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerotrain.errors import PipelineError
from zerotrain.importers.imported_config import ImportedConfig, Outcome
from zerotrain.importers.key_values import read_keys
from zerotrain.importers.keys import OWN_CACHE, SIMPLETUNER_DATASET

NAME = "data_backend_config"
EMBEDS = ("text_embeds", "image_embeds", "conditioning_image_embeds")
STRATEGIES = ("textfile", "filename", "instanceprompt")
HUB = "data/{}"
FRAMING = (
    "the square at the centre of each image is trained on, so images that are no squares are "
    "framed otherwise"
)
BUCKETED = (
    "images keep about their shape, and what does not fit it is cut; the sizes of the buckets are "
    "computed in another way"
)
DROPPED = "smaller images are left out there; here they are enlarged, so take them out yourself"


def read_backends(path: Path, result: ImportedConfig) -> dict[str, Any]:
    """Return the keys of the only image dataset in a file, and note the others.

    Raises:
        PipelineError: it is not a JSON list, or has several image datasets.
    """
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PipelineError(
            f"{path}: cannot be read: {error}", hint="a list of datasets"
        ) from error
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise PipelineError(f"{path}: holds no list of datasets", hint="see DATALOADER.md")
    images = []
    for entry in found:
        kind = entry.get("dataset_type", "image")
        if kind in EMBEDS or entry.get("disabled") is True:
            result.ignore(f"{NAME}: {entry.get('id')}", kind, OWN_CACHE)
        else:
            images.append(entry)
    if len(images) != 1:
        names = ", ".join(str(entry.get("id")) for entry in images)
        raise PipelineError(
            f"{path}: {len(images)} datasets are trained on: {names}",
            hint="one folder of images is trained on: give the others `disabled: true`, or put the "
            "images into one",
        )
    flat = read_keys({NAME: images[0]}, SIMPLETUNER_DATASET, str(path), result)
    return {key.removeprefix(f"{NAME}."): value for key, value in flat.items()}


def put_dataset(found: Mapping[str, Any], result: ImportedConfig) -> None:
    """Set `data` and the resolution.

    Raises:
        PipelineError: a kind of dataset or captions is not supported.
    """
    result.attempt(_put_images, found, result)
    result.attempt(put_captions, found, result, f"{NAME}.")
    with result.collect():
        if "resolution" in found:
            kind = found.get("resolution_type", "pixel_area")
            put_resolution(f"{NAME}.resolution", found["resolution"], kind, result)
    if "repeats" in found:
        result.keep(
            f"{NAME}.repeats", found["repeats"], "data.repeats", found["repeats"] + 1,
            "an epoch sees each image once more than that",
        )  # fmt: skip
    put_framing(found, result)
    for name in ("maximum_image_size", "target_downsample_size"):
        if name in found:
            result.note("changed", f"{NAME}.{name}", found[name], FRAMING)
    if found.get("minimum_image_size"):
        result.note("changed", f"{NAME}.minimum_image_size", found["minimum_image_size"], DROPPED)


def put_framing(found: Mapping[str, Any], result: ImportedConfig) -> None:
    """Set squares, or aspect buckets where SimpleTuner keeps the shape of images."""
    crops = [name for name in ("crop", "crop_style", "crop_aspect") if name in found]
    named = {name: f"{NAME}.{name}" for name in ("crop", *crops)}
    cut, centred = found.get("crop", True), found.get("crop_style") == "center"
    if not cut or found.get("crop_aspect", "square") != "square":
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


def _put_images(found: Mapping[str, Any], result: ImportedConfig) -> None:
    kind = found.get("type")
    if kind == "local" and "instance_data_dir" in found:
        result.keep(f"{NAME}.instance_data_dir", found["instance_data_dir"], "data.images")
    elif kind == "huggingface" and "dataset_name" in found:
        put_hub_dataset(f"{NAME}.dataset_name", found["dataset_name"], result)
    else:
        raise PipelineError(
            f"{NAME}.type is {kind}", hint="local with instance_data_dir, or huggingface"
        )
    result.note("kept", f"{NAME}.type", kind, "", "data.source")
    result.values.setdefault("data.source", "folder")


def put_hub_dataset(key: str, name: str, result: ImportedConfig) -> None:
    """Set the folder for a dataset of the hub, into which the user saves its images."""
    folder = HUB.format(name.rpartition("/")[2])
    result.put(
        "changed", key, name, "data.images", folder,
        "images are read from a folder: save those of the dataset there",
    )  # fmt: skip


def put_captions(found: Mapping[str, Any], result: ImportedConfig, prefix: str = "") -> None:
    """Set the source of the captions.

    Raises:
        PipelineError: the captions are neither in files, in names, nor a common prompt.
    """
    strategy = found.get("caption_strategy")
    prompt = found.get("instance_prompt")
    if found.get("only_instance_prompt"):
        result.note("kept", f"{prefix}only_instance_prompt", True, "", "data.caption_strategy")
        strategy = "instanceprompt"
    if strategy == "instance_prompt":
        strategy = "instanceprompt"
    if strategy is not None and strategy not in STRATEGIES:
        raise PipelineError(
            f"{prefix}caption_strategy is {strategy}", hint=f"one of {', '.join(STRATEGIES)}"
        )
    if strategy is not None:
        result.keep(f"{prefix}caption_strategy", strategy, "data.caption_strategy")
    elif found.get("type") == "local":
        result.assume("data.caption_strategy", "filename", "SimpleTuner's default")
    if strategy == "instanceprompt":
        if not prompt:
            raise PipelineError(f"{prefix}instance_prompt is missing", hint="add it")
        result.keep(f"{prefix}instance_prompt", prompt, "data.instance_prompt")
    elif prompt is not None:
        result.ignore(f"{prefix}instance_prompt", prompt, f"caption_strategy is {strategy}")
    if strategy == "textfile":
        split = not found.get("disable_multiline_split", False)
        result.note(
            "changed" if split else "kept", f"{prefix}disable_multiline_split", not split,
            "a caption file of several lines is one caption here, not several to draw from"
            if split else "a caption file is one caption", "data.caption_strategy",
        )  # fmt: skip


def put_resolution(key: str, given: float, kind: str, result: ImportedConfig) -> None:
    """Set the side of the trained square.

    Args:
        key: Name of the value in messages.
        given: A side in pixels; megapixels if it is below 8, as for `area`.
        kind: pixel (the shorter side), pixel_area (the side of a square of that area) or area.
        result: Receives train.resolution.

    Raises:
        PipelineError: the kind or size is invalid.
    """
    if kind not in ("pixel", "pixel_area", "area"):
        raise PipelineError(f"{key}: resolution_type is {kind}", hint="pixel, pixel_area or area")
    area = kind == "area" or 0 < given < 8
    side = (int(math.sqrt(max(given, 0) * 1024**2)) if area else int(given)) // 8 * 8
    if side < 8:
        raise PipelineError(f"{key} is {given:g}", hint="give a side in pixels")
    reason = "an area in megapixels: the side of its square" if area else ""
    result.keep(key, given, "train.resolution", side, reason)
