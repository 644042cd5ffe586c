"""Import of other programs' configurations and command lines into zerotrain's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerotrain.config import set_launch_file_reader


def enable_launch_files() -> None:
    """Let configurations that this process reads name other programs' files as their launch."""
    set_launch_file_reader(_read_launch_file)


def _read_launch_file(
    path: Path, launch: Mapping[str, Any], train: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    from zerotrain.importers.reading import launch_from_file  # few configurations need it

    return launch_from_file(path, launch, train)
