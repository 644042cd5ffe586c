"""The files that a request may name: configurations and launch files of this project; what the
first says about itself."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from zerotrain.artifact.layout import CONFIGS
from zerotrain.config.read import LAUNCH_FILES
from zerotrain.errors import PipelineError

EDITORS_LINE = "# yaml-language-server:"


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


def comment_at_top(text: str) -> str:
    """Return the comment at the top of a configuration as one line, without that for editors."""
    lines = takewhile(lambda line: line.startswith("#"), text.splitlines())
    texts = (line.lstrip("# ") for line in lines if not line.startswith(EDITORS_LINE))
    return " ".join(texts).strip()


def check_launch_files(raw: Mapping[str, Any]) -> None:
    """Check that the launch files which a configuration names are in the project: they are read.

    Raises:
        PipelineError: one is outside of it.
    """
    phases = raw.get("phases")
    for section in (raw, *(phases if isinstance(phases, list) else ())):
        launch = section.get("launch") if isinstance(section, dict) else None
        name = launch.get("preset") if isinstance(launch, dict) else launch
        if not isinstance(name, str) or not name.endswith(LAUNCH_FILES):
            continue
        try:
            inside = Path(name).resolve().is_relative_to(Path.cwd().resolve())
        except (OSError, ValueError):
            inside = False
        if not inside:
            raise PipelineError(
                f"launch: {name!r} is not in the project's folder",
                hint="copy the file into the project, or choose a preset",
            )
