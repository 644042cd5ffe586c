"""The files of jobs: inputs, those behind the digest of a dataset, and the error in a log.

The input of rule prepare_dataset is a digest of the dataset's files (data.files), whose change does
not name them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from zerotrain.config.data import DataConfig
from zerotrain.data.files import Changes, DatasetFiles
from zerotrain.machine.regular_file import open_to_read

RULE = "prepare_dataset"
BASES = ("build_base", "build_shared_base", "build_base_of_data")
"""The rules that provide a base."""


def inputs_of(job: Any) -> list[str]:
    """List the files whose changes rerun a job: its inputs, or a dataset's files."""
    dataset = dataset_files(job)
    return sorted(set(map(str, job.input)) - unwatched(job)) if dataset is None else dataset.paths


def unwatched(job: Any) -> set[str]:
    """Return the inputs whose changes do not rerun a job: the dataset that a preset is built for.

    A preset that is built stays as it is: with another tokenizer or autoencoder, every sample would
    be encoded again.
    """
    dataset = job.input.get("dataset") if job.rule.name in BASES else None
    return {str(dataset)} if dataset else set()


def dataset_files(job: Any) -> DatasetFiles | None:
    """Return the files of a job's dataset; None for another rule's job, text and the example."""
    if job.rule.name != RULE or not (data := _section(job.params.data)).has_image_files:
        return None
    return DatasetFiles(data, Path(job.output.manifest).parent)


def find_dataset_changes(job: Any) -> Changes | None:
    """Find the files that changed since a dataset was prepared; None if it has no digest of files.

    Args:
        job: The job of any rule.
    """
    files = dataset_files(job)
    return None if files is None else files.find_changes() or Changes()


def _section(values: Mapping[str, Any]) -> DataConfig:
    """Return the section of a job's parameter, which has the keys at their defaults, too."""
    fields = DataConfig.model_fields
    given = {
        name: value
        for name, value in values.items()
        if value != to_jsonable_python(fields[name].get_default(call_default_factory=True))
    }
    return DataConfig.model_validate(given)


ERROR_LINES = 6
"""Lines of the log that are shown."""
MOST_BYTES = 4 * 2**20
"""End of a log that is looked through."""


def last_error(logs: list[str], sizes: Mapping[str, int], *, at_end: bool = False) -> list[str]:
    """Return a failed stage's error message, from the last `ERROR` line of its logs.

    Args:
        logs: Log files; the first with such a line is used.
        sizes: Size of each file in bytes before the stage started: logs are appended to.
        at_end: Whether only the end of a log counts, so that nothing succeeded after the error.
    """
    for log in logs:
        before = sizes.get(log, 0)
        try:
            with open_to_read(Path(log)) as stream:
                size = os.fstat(stream.fileno()).st_size
                stream.seek(max(before if before <= size else 0, size - MOST_BYTES))
                lines = stream.read(MOST_BYTES).decode(errors="replace").splitlines()
        except OSError:
            continue
        places = [place for place, line in enumerate(lines) if line.startswith("ERROR")]
        if at_end and places and places[-1] < len(lines) - ERROR_LINES:
            continue
        if places:
            return lines[places[-1] :][:ERROR_LINES]
    return []


def log_size(path: str) -> int:
    """Return the bytes of a log; 0 if it is missing."""
    try:
        return Path(path).stat().st_size
    except OSError:
        return 0
