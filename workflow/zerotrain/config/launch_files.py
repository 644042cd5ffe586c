"""The reader of `launch: FILE` in a configuration, a file of accelerate, DeepSpeed or SimpleTuner.

The reader is in zerotrain.importers, which imports this package. So each program that reads
configurations sets it first, by `zerotrain.importers.enable_launch_files`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

LAUNCH_FILES = (".yaml", ".yml", ".json")
"""Ends of a `launch:` that is accelerate's or DeepSpeed's file instead of a preset."""

Values = dict[str, Any]
Reader = Callable[[Path, Mapping[str, Any], Mapping[str, Any]], tuple[Values, Values]]
"""From a file, and the run's own values of launch and train, to the file's values of both."""

_readers: list[Reader] = []


def set_reader(reader: Reader) -> None:
    """Let configurations name launch files."""
    _readers[:] = [reader]


def read_launch_file(
    path: Path, launch: Mapping[str, Any], train: Mapping[str, Any]
) -> tuple[Values, Values]:
    """Read the values of launch and train that a file holds.

    Args:
        path: What the run's `launch` names.
        launch: The other values of the run's launch.
        train: The run's values of train.

    Raises:
        PipelineError: the file cannot be read, or contradicts the run.
    """
    assert _readers, "call zerotrain.importers.enable_launch_files() first"
    return _readers[0](path, launch, train)
