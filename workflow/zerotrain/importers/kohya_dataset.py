"""The dataset configuration of kohya's sd-scripts (TOML or JSON) as the section `data`.

Source: docs/config_README-en.md, library/config_util.py and library/model_util.py
(make_bucket_resolutions) of sd-scripts. A value of a subset goes before one of its dataset, and
this before one of [general].
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerotrain.config.image_source import ImageSourceConfig
from zerotrain.data.listing import list_images
from zerotrain.errors import PipelineError
from zerotrain.importers.files import check_may_look, load_json, load_toml, may_look
from zerotrain.importers.imported_config import (
    ImportedConfig,
    put_resolutions,
    source_names,
    source_prefixes,
)
from zerotrain.importers.key_values import put_rows, read_keys, to_extension
from zerotrain.importers.keys import KOHYA_DATASET

BUCKETS = ("bucket_reso_steps", "min_bucket_reso", "max_bucket_reso", "bucket_no_upscale")
LONGEST = 65536
"""Pixels of a side; no format of images has more."""
SUBFOLDERS = "{} images in subfolders of {} are trained on, too; kohya's scripts read none of them"
FIRST_LINE = "kohya's scripts read the first line"
REGULARISATION = (
    "kohya's scripts repeat regularisation images until they are as many as the others: here "
    "`repeats` of the source says how often"
)


@dataclass(frozen=True)
class _Subset:
    """A folder, with the keys of its dataset and of [general]."""

    values: dict[str, Any]

    def get(self, name: str) -> Any:
        """Return the value of a key, or kohya's default."""
        return self.values.get(name, KOHYA_DATASET[name].default)

    def put(self, result: ImportedConfig, at: str, *names: str) -> None:
        """Set our keys of these that are given and are neither off nor empty."""
        given = {name: self.values[name] for name in names if self.values.get(name)}
        put_rows(given, KOHYA_DATASET, result, *names, at=at)


def read_kohya_dataset(path: Path, result: ImportedConfig) -> None:
    """Read a dataset configuration.

    Raises:
        PipelineError: it is not one, or its keys cannot be honoured.
    """
    subsets = _read_subsets(path, result)
    several = len(subsets) > 1 or bool(subsets[0].get("is_reg"))
    names = source_names([str(one.values.get("image_dir", "")) for one in subsets])
    prefixes = source_prefixes(names, several=several, result=result)
    for subset, prefix in zip(subsets, prefixes, strict=True):
        result.attempt(_put_images, subset, prefix, result)
        result.attempt(_put_captions, subset, prefix, result)
        result.attempt(_put_caption_options, subset, prefix, result)
    with result.collect():
        sides = [_side(subset) for subset in subsets]
        put_resolutions("resolution", sides, prefixes, result)
        _put_buckets(subsets, result)
    with result.collect():
        _put_common(subsets, result)


def _read_subsets(path: Path, result: ImportedConfig) -> list[_Subset]:
    found = load_json(path) if path.suffix.casefold() == ".json" else load_toml(path)
    datasets = _tables(found, "datasets", str(path))
    (general,) = _tables({"general": [found.pop("general", {})]}, "general", str(path))
    general = read_keys(general, KOHYA_DATASET, f"{path}: general", result)
    if found:
        raise PipelineError(
            f"{path}: {min(found)}: neither [general] nor [[datasets]]",
            hint="give kohya's dataset configuration (--dataset_config); its training options are "
            "not imported",
        )
    subsets = []
    for number, dataset in enumerate(datasets):
        inner = _tables(dataset, "subsets", f"{path}: datasets.{number}")
        shared = general | read_keys(dataset, KOHYA_DATASET, f"{path}: datasets.{number}", result)
        for place, own in enumerate(inner):
            where = f"{path}: datasets.{number}.subsets.{place}"
            subsets.append(_Subset(shared | read_keys(own, KOHYA_DATASET, where, result)))
    if not subsets:
        raise PipelineError(
            f"{path}: has no [[datasets.subsets]]", hint="each names a folder: image_dir"
        )
    return subsets


def _tables(section: dict[str, Any], name: str, where: str) -> list[dict[str, Any]]:
    """Take a list of tables out of a section.

    Raises:
        PipelineError: it is something else.
    """
    found = section.pop(name, [])
    if isinstance(found, list) and all(isinstance(one, dict) for one in found):
        return found
    raise PipelineError(
        f"{where}: {name}: must be keys with values (found {found!r})",
        hint="write it as docs/config_README-en.md of kohya's scripts has it",
    )


def _put_images(subset: _Subset, prefix: str, result: ImportedConfig) -> None:
    if "image_dir" not in subset.values:
        raise PipelineError("image_dir is missing in a subset", hint="name the folder of images")
    folder = str(subset.get("image_dir"))
    result.keep("image_dir", folder, f"{prefix}images")
    if may_look(folder):
        with suppress(PipelineError):  # a folder without images may be filled later
            listing = list_images(ImageSourceConfig(images=folder))
            if inner := [one for one in listing.images if "/" in one]:
                reason = SUBFOLDERS.format(len(inner), folder)
                result.note("changed", "image_dir", folder, reason, f"{prefix}images")
    if subset.get("num_repeats") != 1:
        result.keep("num_repeats", subset.get("num_repeats"), f"{prefix}repeats")
    subset.put(result, prefix, "flip_aug")
    if subset.get("is_reg"):
        key = f"{prefix}is_regularisation_data"
        result.put("changed", "is_reg", True, key, True, REGULARISATION)


def _put_captions(subset: _Subset, prefix: str, result: ImportedConfig) -> None:
    """Set the metadata, caption files, or `class_tokens` as the caption of a folder without them.

    Raises:
        PipelineError: class_tokens would be the caption of some images of the folder.
    """
    if subset.values.get("metadata_file"):
        subset.put(result, prefix, "metadata_file")
        names = "class_tokens", "caption_extension"
        result.ignore_all({**subset.values}, names, "captions come from metadata_file")
    else:
        _put_caption_files(subset, prefix, result)
    if f"{prefix}caption_strategy" not in result.values:
        result.assume(f"{prefix}multiline_captions", "first", FIRST_LINE)


def _put_caption_files(subset: _Subset, prefix: str, result: ImportedConfig) -> None:
    tokens = subset.values.get("class_tokens")
    extension = to_extension("caption_extension", subset.get("caption_extension"))
    if tokens is not None:
        folder = str(subset.get("image_dir"))
        check_may_look(folder, "class_tokens")
        listing = list_images(ImageSourceConfig(images=folder, caption_extension=extension))
        without = [
            one for one in listing.images if str(Path(one).with_suffix("")) not in listing.captions
        ]
        if len(without) == len(listing.images):
            result.keep("class_tokens", tokens, f"{prefix}instance_prompt")
            key = f"{prefix}caption_strategy"
            result.keep(
                "class_tokens", tokens, key, "instanceprompt", "no image has a caption file"
            )
            return
        if without:
            raise PipelineError(
                f"class_tokens: {len(without)} of {len(listing.images)} images in {folder} have no "
                f"{extension} file, such as {min(without)}, and would get it as their caption",
                hint=f"write it into their {extension} files",
            )
        result.ignore("class_tokens", tokens, "every image has a caption file")
    if "caption_extension" in subset.values:
        result.keep("caption_extension", extension, f"{prefix}caption_extension")
    else:
        result.assume(f"{prefix}caption_extension", extension, "kohya's default")


def _put_caption_options(subset: _Subset, prefix: str, result: ImportedConfig) -> None:
    """Set what is added to captions, their variants, and the mask of transparent images."""
    subset.put(result, prefix, "caption_prefix", "caption_suffix")
    varied = subset.get("shuffle_caption") or subset.get("caption_tag_dropout_rate")
    subset.put(result, prefix, "shuffle_caption", "caption_tag_dropout_rate")
    for name in ("keep_tokens", "caption_separator"):
        value = subset.get(name)
        if value != KOHYA_DATASET[name].default and varied:
            result.keep(name, value, f"{prefix}{name}")
        elif name in subset.values:
            result.ignore(name, value, "captions have no variants, or it is the default")
    if separator := subset.values.get("keep_tokens_separator"):
        if varied:
            raise PipelineError(
                f"keep_tokens_separator: {separator!r} cannot be honoured: keep_tokens counts tags",
                hint="set keep_tokens, and take the separator out of the captions",
            )
        result.ignore("keep_tokens_separator", separator, "captions have no variants")
    if separator := subset.values.get("secondary_separator"):
        if varied:
            raise PipelineError(
                f"secondary_separator: {separator!r} cannot be honoured: every tag is shuffled "
                "and dropped by itself",
                hint="take it out, or shuffle_caption and caption_tag_dropout_rate",
            )
        replaced = {separator: str(subset.get("caption_separator"))}
        result.keep("secondary_separator", separator, f"{prefix}caption_replacements", replaced)
    subset.put(result, prefix, "alpha_mask")


def _side(subset: _Subset) -> int:
    """Return the side of the smallest square that holds a dataset's area, in pixels."""
    width, height = _resolution(subset)
    if width == height:
        return width // 8 * 8
    return -(-(math.isqrt(width * height - 1) + 1) // 8) * 8


def _resolution(subset: _Subset) -> tuple[int, int]:
    """Return width and height of a dataset's largest square or rectangle, in pixels.

    Raises:
        PipelineError: it has no resolution, or one that is no square, without buckets.
    """
    given = subset.values.get("resolution")
    width, height = given if isinstance(given, list) and len(given) == 2 else (given, given)
    if (
        not isinstance(width, int)
        or not isinstance(height, int)
        or not (0 < width <= LONGEST and 0 < height <= LONGEST)
    ):
        raise PipelineError(
            f"resolution is {given}", hint="give each dataset a number, or [width, height]"
        )
    if width != height and not subset.get("enable_bucket"):
        raise PipelineError(
            f"resolution: {width}x{height} is no square",
            hint="without enable_bucket all images are cut to squares",
        )
    return width, height


def _put_buckets(subsets: list[_Subset], result: ImportedConfig) -> None:
    """Set aspect buckets with kohya's own sizes, where all datasets share them."""
    chosen = {bool(subset.get("enable_bucket")) for subset in subsets}
    if len(chosen) > 1:
        raise PipelineError(
            "enable_bucket is on for some datasets only",
            hint="let all keep the shape of images (data.aspect_buckets), or none",
        )
    random = {bool(subset.get("random_crop")) for subset in subsets}
    if chosen == {False} and True in random:
        raise PipelineError(
            "random_crop: squares are cut from the centre of images", hint="set enable_bucket"
        )
    if chosen == {False}:
        return
    if len(random) > 1:
        raise PipelineError("random_crop is on for some datasets only", hint="set it for all")
    key = "data.aspect_buckets"
    if random == {True}:
        result.put("changed", "random_crop", True, f"{key}.crop", "random", "drawn once")
    shared = {
        (math.prod(_resolution(one)), *(one.get(name) for name in BUCKETS)) for one in subsets
    }
    area, step, least, most, _ = min(shared)
    if any(one[1] != step for one in shared):
        raise PipelineError("bucket_reso_steps differs between datasets", hint="give them one")
    if len({bool(one[4]) for one in shared}) > 1:
        raise PipelineError("bucket_no_upscale is on for some datasets only", hint="set it for all")
    if not 1 <= step <= least <= most <= LONGEST:
        raise PipelineError(
            f"buckets of {least} to {most} pixels in steps of {step}",
            hint=f"bucket_reso_steps, min_bucket_reso and max_bucket_reso are at least 1, in this "
            f"order, and at most {LONGEST}",
        )
    result.keep("bucket_reso_steps", step, f"{key}.alignment")
    if all(one[4] for one in shared):
        reason = "sizes are computed in another way; smaller images get a smaller bucket"
        result.put("changed", "bucket_no_upscale", True, f"{key}.max_upscale", 1, reason)
    elif len(shared) == 1:
        sizes = bucket_sizes(area, least, most, step)
        result.keep("enable_bucket", True, f"{key}.sizes", sizes, "the sizes of kohya's scripts")
    else:
        reason = "the datasets have different sizes, which are computed in another way here"
        result.note("changed", "enable_bucket", True, reason, key)
    exact = f"{key}.sizes" in result.values
    reason = "" if exact else "these sizes have no limits but data.aspect_buckets' aspects"
    for name in ("min_bucket_reso", "max_bucket_reso"):
        given = {one.values[name] for one in subsets if name in one.values}
        for value in sorted(given):
            result.note("kept" if exact else "changed", name, value, reason, key)


def bucket_sizes(area: int, least: int, most: int, step: int) -> list[list[int]]:
    """List the sizes of kohya's make_bucket_resolutions, as [width, height]."""
    least, most = least // step * step, -(-most // step) * step
    own = math.isqrt(area) // step * step
    found = {(own, own)}
    for width in range(least, most + 1, step):
        height = min(most, area // width // step * step)
        if height >= least:
            found |= {(width, height), (height, width)}
    return [list(size) for size in sorted(found)]


def _put_common(subsets: list[_Subset], result: ImportedConfig) -> None:
    """Set what all datasets have to share: the batch, and the share of dropped captions."""
    for name, ours, reason in (
        ("batch_size", "train.global_batch_size", "of one GPU, without gradient accumulation"),
        ("caption_dropout_rate", "train.caption_dropout_probability", ""),
    ):
        found = {subset.get(name) for subset in subsets}
        if len(found) > 1:
            raise PipelineError(
                f"{name} is {', '.join(map(str, sorted(found)))} in different datasets",
                hint=f"there is one {ours}: give all one value",
            )
        value = found.pop()
        if any(name in subset.values for subset in subsets):
            result.put("changed" if reason else "kept", name, value, ours, value, reason)
