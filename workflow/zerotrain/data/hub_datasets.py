"""Datasets of Hugging Face: from the hub by id, or from a folder written by save_to_disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerotrain.errors import PipelineError

if TYPE_CHECKING:
    from zerotrain.config.data import DataConfig

CONVERTED = "refs/convert/parquet"
"""The branch with the hub's Parquet copy of each dataset, by subset and split."""


def hub_rows(
    data: DataConfig,
) -> tuple[Iterator[tuple[str, dict[Any, Any]]], list[str] | dict[str, str] | None]:
    """Load the rows of one split of text, each with its place, and the names of its labels.

    Raises:
        PipelineError: as load_split.
    """
    found = load_split(data)
    # The library would decode images in any format that Pillow supports, including EPS.
    if media := [name for name, feature in found.features.items() if _is_decoded(feature)]:
        found = found.remove_columns(media)
    names = data.label_names
    if names is None and data.response_column in found.features:
        names = getattr(found.features[data.response_column], "names", None)
    rows = ({column: _without_nulls(value) for column, value in row.items()} for row in found)
    return ((f"{data.hub_split} row {i}", row) for i, row in enumerate(rows, 1)), names


def load_split(data: DataConfig) -> Any:
    """Load one split of data.path; from the hub, it is downloaded and prepared if it is missing.

    Raises:
        PipelineError: there is no such dataset or split, or a key does not apply to a dataset on
            disk.
    """
    import datasets
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    folder = Path(str(data.path)).expanduser()
    if data.is_on_hub and folder.is_dir():
        raise PipelineError(
            f"data.path: {folder} is a folder, and path names a dataset of images on the hub",
            hint="name a folder in data.images",
        )
    try:
        if folder.is_dir():
            found = datasets.load_from_disk(str(folder))
            several = isinstance(found, datasets.DatasetDict)
            _check_keys_apply(data, () if several else ("hub_split",))
            return found[data.hub_split] if several else found
        return _from_hub(datasets, data)
    except (
        OSError,
        ValueError,
        KeyError,
        RuntimeError,
        HTTPError,
        datasets.exceptions.DatasetsError,
    ) as error:
        raise PipelineError(
            f"data.path: {data.path}, split {data.hub_split}: {' '.join(str(error).split())}",
            hint="check data.path, data.subset, data.hub_split and data.revision, and the network; "
            "on a node without internet run `zerotrain fetch CONFIG` on the login node and source "
            "its env.sh in jobs",
        ) from error


def _without_nulls(value: Any) -> Any:
    """Return a cell without keys whose value is null, at every level.

    All structs of a column have the same fields: those that an object does not have are null.
    """
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def _is_decoded(feature: Any) -> bool:
    """Return whether reading a column would open files: images, sound, documents."""
    if isinstance(feature, dict):
        return any(map(_is_decoded, feature.values()))
    if isinstance(feature, list):
        return any(map(_is_decoded, feature))
    inner = getattr(feature, "feature", None)
    return hasattr(feature, "decode_example") or (inner is not None and _is_decoded(inner))


def _from_hub(datasets: Any, data: DataConfig) -> Any:
    """Load a split from the hub; for a dataset that a script makes, the hub's copy."""
    asked = {"split": data.hub_split, **({"revision": data.revision} if data.revision else {})}
    try:
        return datasets.load_dataset(str(data.path), data.subset, **asked)
    except RuntimeError as error:
        # The hub's copy is of the newest revision alone.
        if data.revision or "scripts are no longer supported" not in str(error):
            raise
        split = data.hub_split.partition("[")[0]
        files = (
            f"hf://datasets/{data.path}@{CONVERTED}/{data.subset or 'default'}/{split}/*.parquet"
        )
        return datasets.load_dataset("parquet", data_files={split: files}, split=data.hub_split)


def _check_keys_apply(data: DataConfig, others: tuple[str, ...]) -> None:
    for key in ("subset", "revision", *others):
        if key in data.model_fields_set:
            raise PipelineError(
                f"data.{key}: {data.path} is what save_to_disk wrote, which has none to choose",
                hint=f"remove data.{key}",
            )
