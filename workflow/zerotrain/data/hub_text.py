"""Datasets of Hugging Face: by id from the hub, or from the folder that save_to_disk wrote."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerotrain.errors import PipelineError

if TYPE_CHECKING:
    from zerotrain.config import DataConfig


def hub_rows(
    data: DataConfig,
) -> tuple[Iterator[tuple[str, dict[Any, Any]]], list[str] | dict[str, str] | None]:
    """The rows of one split, each with where it stands, and the names of its labels.

    Raises:
        PipelineError: the package `datasets` is missing, or there is no such dataset or split.
    """
    try:
        import datasets
    except ImportError as error:
        raise PipelineError(
            f"data.path: {data.path} is no .json, .jsonl or .csv file, and datasets of Hugging "
            "Face need the package `datasets`, which is not installed",
            hint="pip install datasets; or export the dataset to a file",
        ) from error
    folder = Path(str(data.path)).expanduser()
    try:
        if folder.is_dir():
            found = datasets.load_from_disk(str(folder))
            if isinstance(found, datasets.DatasetDict):
                found = found[data.hub_split]
        else:
            found = datasets.load_dataset(str(data.path), data.subset, split=data.hub_split)
    except (OSError, ValueError, KeyError) as error:
        raise PipelineError(
            f"data.path: {data.path}, split {data.hub_split}: {' '.join(str(error).split())}",
            hint="check data.path, data.subset and data.hub_split, and the network",
        ) from error
    names = data.label_names
    if names is None and data.response_column in found.features:
        names = getattr(found.features[data.response_column], "names", None)
    return ((f"{data.hub_split} row {i}", row) for i, row in enumerate(found, 1)), names
