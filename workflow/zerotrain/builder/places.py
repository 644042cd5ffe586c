"""The files that a request may name: configurations of this project."""

from __future__ import annotations

from pathlib import Path

from zerotrain.artifact.layout import CONFIGS
from zerotrain.errors import PipelineError


def configuration_file(text: str) -> Path:
    """Return the configuration that a request names, as a path relative to the project.

    Raises:
        PipelineError: it is outside of config/, no .yaml file, or not there.
    """
    root = CONFIGS.resolve()
    try:
        path = Path(text).resolve()
        inside = path.is_relative_to(root) and path.suffix in (".yaml", ".yml") and path.is_file()
    except (OSError, ValueError):  # a name that is too long, or has a null byte
        inside = False
    if not inside:
        raise PipelineError(
            f"{text!r}: it is no configuration of {CONFIGS}/",
            hint="choose one of the list on the start page",
        )
    return CONFIGS / path.relative_to(root)
