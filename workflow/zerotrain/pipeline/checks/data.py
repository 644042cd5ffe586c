"""Checks of the data: its folder, the captions and conditioning images, and their number.

Only the table of captions and the base's model_index.json are read. cache_latents checks a base
that is not downloaded yet.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache

from zerotrain.artifact.layout import DataFolder
from zerotrain.config.data import DataConfig
from zerotrain.config.image_source import SHARDS, ImageSourceConfig
from zerotrain.config.problems import collect_errors
from zerotrain.config.run import RunConfig
from zerotrain.data.conditioning import check_equal_numbers
from zerotrain.data.conditioning_file import prompt_files
from zerotrain.data.files import DatasetFiles
from zerotrain.data.folder import incomplete
from zerotrain.data.source_list import naming, open_part
from zerotrain.data.text import hub_id
from zerotrain.errors import PipelineError
from zerotrain.models.families.conditioning import (
    CONDITIONED_PRESETS,
    CONDITIONING,
    Conditioning,
    check_conditioning,
    check_crops,
    read_conditioning,
)
from zerotrain.pipeline.checks.base import find_base_folder


def check_data(run: RunConfig) -> list[PipelineError]:
    """List what is missing from a run's data and its prompts' conditioning images."""
    return [*_check_files(run), *collect_errors(lambda: _check_prompts(run))]


def _check_files(run: RunConfig) -> list[PipelineError]:
    """List what is missing from a run's data, except where it is as it was when it was prepared."""
    if run.data.has_image_files:
        with suppress(PipelineError):
            if DatasetFiles(run.data, DataFolder(run.data_name).path).are_unchanged():
                return []
    return check_source(run.data)


def _check_prompts(run: RunConfig) -> None:
    prompt_files(run.evaluate.conditioning_images or [], "evaluate.conditioning_images")
    for phase in run.phases:
        if phase.validation is not None:
            images = phase.validation.conditioning_images or []
            prompt_files(images, "validation.conditioning_images")


def check_source(data: DataConfig) -> list[PipelineError]:
    """List what is missing from the data that a section names."""
    return list(_problems(data.model_dump_json(exclude_unset=True)))


def count_conditioning(data: DataConfig) -> int | None:
    """Return the number of conditioning images per sample; None if the data has problems."""
    if not data.conditioning_columns:
        return len(data.conditioning_folders)
    try:
        _, whole = incomplete(data)
        return check_equal_numbers((entry.file, entry.conditioning) for entry in whole) or None
    except PipelineError:
        return None


def forget_data() -> None:
    """Look again at data that was checked."""
    _problems.cache_clear()


@cache  # the runs of a sweep share a dataset
def _problems(data: str) -> tuple[PipelineError, ...]:
    return tuple(collect_errors(lambda: _check(DataConfig.model_validate_json(data))))


def _check(data: DataConfig) -> None:
    if data.is_text:
        hub_id(data)
    if not data.has_image_files:
        return
    for part in data.sources or ():
        with naming(part.name):
            _check_images(part, data.max_bad_samples)
    if data.sources is None:
        _check_images(data, data.max_bad_samples)


def _check_images(data: ImageSourceConfig, most_bad: int) -> None:
    if data.source in SHARDS:
        open_part(data).found()  # prepare_dataset counts bad samples
        return
    missing, whole = incomplete(data)
    check_equal_numbers((entry.file, entry.conditioning) for entry in whole)
    if not missing or (whole and len(missing) <= most_bad):
        return
    images = len(missing) + len(whole)
    allowed = f"{most_bad} may be bad" if whole else "none is left"
    first = missing[0]
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    if data.is_conditioned:
        raise PipelineError(
            f"data.images: {len(missing)} of {images} images in {data.images} have no caption or "
            f"no conditioning image, and {allowed} (data.max_bad_samples): {first.file} "
            f"({first.reason}){more}",
            hint="docs/conditioning.md shows how they are found; or raise data.max_bad_samples to "
            "skip them",
        )
    raise PipelineError(
        f"data.images: {len(missing)} of {images} images in {data.images} have no caption, "
        f"and {allowed} (data.max_bad_samples): {first.file}{more}",
        hint=f"put NAME{data.caption_extension} next to each NAME.png, or a metadata.csv with "
        "the columns file_name,text into the folder; or raise data.max_bad_samples to skip "
        "them",
    )


def check_conditioning_images(run: RunConfig) -> list[PipelineError]:
    """List what is wrong with the number and the crops of conditioning images per sample."""
    if run.is_preset and run.data.is_conditioned:
        found: Conditioning | None = CONDITIONING[run.family][CONDITIONED_PRESETS[run.family]]
    elif run.is_text or run.is_preset or (folder := find_base_folder(run)) is None:
        return []
    else:
        try:
            found = read_conditioning(run.family, folder)
        except (OSError, ValueError):  # check_base reports what is wrong with the folder
            return []
    if (count := count_conditioning(run.data)) is None:
        return []
    try:
        check_conditioning(found, count, run.base)
        check_crops(found, count, run.data, run.base)
    except PipelineError as error:
        return [error]
    return []
