"""The run's configuration: typed, validated, with messages that name file, key, value and fix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

MAIN_CONFIG = Path("config/config.yaml")
"""The file that the Snakefile reads by default, and commands where no run is named."""
Values = dict[str, Any]
LaunchFileReader = Callable[[Path, Mapping[str, Any], Mapping[str, Any]], tuple[Values, Values]]
"""From a file, and the run's own values of launch and train, to the file's values of both."""
_readers: list[LaunchFileReader] = []


def set_launch_file_reader(reader: LaunchFileReader) -> None:
    """Let configurations name launch files.

    The reader is in zerotrain.importers, which imports this package. So each program that reads
    configurations sets it first, by `zerotrain.importers.enable_launch_files`. Every command does,
    and few read a configuration: this module imports nothing that takes long.
    """
    _readers[:] = [reader]


def read_launch_file(
    path: Path, launch: Mapping[str, Any], train: Mapping[str, Any]
) -> tuple[Values, Values]:
    """Return the values of launch and train of a launch file.

    Args:
        path: The file.
        launch: The run's own values of launch.
        train: Those of train.

    Raises:
        PipelineError: the file cannot be used.
    """
    assert _readers, "call zerotrain.importers.enable_launch_files() first"
    return _readers[0](path, launch, train)
