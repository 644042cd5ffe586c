"""Checks of the data: its folder, the captions and conditioning images, and their number.

No image is opened, and a plan reads only the table of captions and the base's model_index.json;
`zerotrain check` reads caption files and rows of text as well. cache_latents checks a base that is
not downloaded yet.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import cache

from zerotrain.artifact import Artifact, read_manifest
from zerotrain.artifact.layout import DataFolder
from zerotrain.artifact.manifest import DATASET
from zerotrain.config.data import DataConfig
from zerotrain.config.families import FAMILIES, Conditioning
from zerotrain.config.problems import collect_errors
from zerotrain.config.run import RunConfig
from zerotrain.data.bad_samples import NO_CAPTION, Counted, count_bad
from zerotrain.data.conditioning import check_equal_numbers, prompt_files
from zerotrain.data.files import DatasetFiles, forget_walks
from zerotrain.data.source import Found
from zerotrain.errors import PipelineError
from zerotrain.graph.checks.base import find_base_folder
from zerotrain.models.families.conditioning import (
    check_conditioning,
    check_crops,
    read_conditioning,
)


def check_data(run: RunConfig, *, captions: bool = False) -> list[PipelineError]:
    """List what is missing from a run's data and its prompts' conditioning images.

    Args:
        run: The run.
        captions: Whether to read rows of text, and caption files next to images.
    """
    problems = [] if _prepared(run) else check_source(run.data, captions=captions)
    return [*problems, *collect_errors(lambda: _check_prompts(run))]


def describe_data(runs: Iterable[RunConfig]) -> list[str]:
    """Say of each dataset how many samples are bad, as far as `zerotrain check` has looked.

    Of a built-in source there is nothing to say.
    """
    datasets = {run.data_name: run for run in reversed([*runs])}
    return [*filter(None, map(_describe, reversed(datasets.values())))]


def _describe(run: RunConfig) -> str | None:
    if prepared := _prepared(run):
        from zerotrain.data.dataset_folder import read_bad

        bad = len(read_bad(prepared))
        total = bad + sum(prepared.content["count"][split] for split in ("train", "holdout"))
        return (
            f"data: {bad} of {total} samples are bad, as {prepared.folder} lists them; nothing "
            "changed since"
        )
    show = f"`zerotrain data show {run.run}`"
    found = _count(run.data.model_dump_json(exclude_unset=True), captions=True)
    if found is None:
        if run.data.path is None:
            return None
        return f"data: {run.data.path} on the hub is not opened; {show} counts bad samples"
    described = f"data: {found.describe()}"
    if found.bad:
        described += f", and {run.data.max_bad_samples} may be: {found.describe_first()}"
    opened = "" if run.is_text else f"; no image is opened, which {show} does"
    return described + opened


def _prepared(run: RunConfig) -> Artifact | None:
    """Return the prepared dataset if its images and captions are as they were."""
    if not run.data.has_image_files:
        return None
    folder = DataFolder(run.data_name).path
    with suppress(PipelineError):
        if DatasetFiles(run.data, folder).are_unchanged():
            return read_manifest(folder, DATASET)
    return None


def _check_prompts(run: RunConfig) -> None:
    prompt_files(run.evaluate.conditioning_images or [], "evaluate.conditioning_images")
    for phase in run.phases:
        if phase.validation is not None:
            images = phase.validation.conditioning_images or []
            prompt_files(images, "validation.conditioning_images")


def check_source(data: DataConfig, *, captions: bool = False) -> list[PipelineError]:
    """List what is missing from the data that a section names; arguments as of check_data."""
    return list(_problems(data.model_dump_json(exclude_unset=True), captions=captions))


def count_conditioning(data: DataConfig) -> int | None:
    """Return the number of conditioning images per sample; None if the data has problems."""
    if not data.conditioning_columns:
        return len(data.conditioning_folders)
    try:
        found = _count(data.model_dump_json(exclude_unset=True), captions=False)
        return _equal_numbers(found) if found else None
    except PipelineError:
        return None


def forget_data() -> None:
    """Look again at data that was checked."""
    forget_walks()
    _problems.cache_clear()
    _count.cache_clear()


@cache  # the runs of a sweep share a dataset
def _problems(data: str, *, captions: bool) -> tuple[PipelineError, ...]:
    return tuple(collect_errors(lambda: _check(data, captions=captions)))


@cache
def _count(data: str, *, captions: bool) -> Counted | None:
    return count_bad(DataConfig.model_validate_json(data), captions=captions)


def _check(text: str, *, captions: bool) -> None:
    found = _count(text, captions=captions)
    if found is None:
        return
    data = DataConfig.model_validate_json(text)
    _equal_numbers(found)
    key = "path" if data.is_text else "sources" if data.sources else "images"
    found.check(f"data.{key}", data.max_bad_samples, _hint(data, found))


def _equal_numbers(found: Counted) -> int | None:
    entries = [one for one in found.usable if isinstance(one, Found)]
    return check_equal_numbers((one.file, one.conditioning) for one in entries) or None


def _hint(data: DataConfig, found: Counted) -> str:
    skip = "raise data.max_bad_samples to skip them"
    if data.is_text:
        return f"fix or remove these rows, or {skip}; docs/text.md shows the forms that are read"
    if data.is_conditioned:
        return f"docs/conditioning.md shows how images are found; or {skip}"
    if data.sources is None and found.bad and (found.bad[0].reason or "").startswith(NO_CAPTION):
        return (
            f"put NAME{data.caption_extension} next to each NAME.png, or a metadata.csv with the "
            f"columns file_name,text into the folder; or {skip}"
        )
    return f"fix or remove them, or {skip}"


def check_conditioning_images(run: RunConfig) -> list[PipelineError]:
    """List what is wrong with the number and the crops of conditioning images per sample."""
    spec = FAMILIES[run.family]
    if run.is_preset and run.data.is_conditioned:
        found: Conditioning | None = spec.conditioning[spec.conditioned_preset]
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
