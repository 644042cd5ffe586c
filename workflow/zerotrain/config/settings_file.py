"""The file with the settings of a stage, which its rule takes as an input and its command reads.

It is written before Snakemake plans (zerotrain.graph.currency): the stage reads the values
of the plan, whatever is edited meanwhile, and no others.

    {"stage": "evaluate", "version": 1, "rebuild": null, "settings": {...}}
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerotrain.artifact.documents import check_type, read_object
from zerotrain.artifact.recipe import Recipe
from zerotrain.artifact.stage_versions import VERSIONS
from zerotrain.config.stage_settings import SETTINGS, StageSettings
from zerotrain.errors import PipelineError


@dataclass(frozen=True)
class SettingsFile:
    """What the file of a stage says."""

    stage: str
    version: int
    settings: dict[str, Any]
    rebuild: str | None = None
    """Since when the plan needs the folder made again, though nothing else may have changed; None
    if a folder of the same recipe is kept."""


def render(stage: str, settings: StageSettings, rebuild: str | None = None) -> str:
    """Return the text of a stage's file; equal settings give equal texts."""
    values = {
        "stage": stage,
        "version": VERSIONS[stage],
        "rebuild": rebuild,
        "settings": settings.model_dump(mode="json", exclude_unset=True),
    }
    return json.dumps(values, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def read_settings(path: Path, stage: str) -> tuple[StageSettings, SettingsFile]:
    """Read the settings of a stage.

    Raises:
        PipelineError: the file is missing, damaged, or of another stage.
    """
    if not path.exists():
        raise PipelineError(f"{path}: no such file with settings of {stage}", hint=AGAIN)
    found = check_type(read_object(path), SettingsFile, path, hint=AGAIN)
    if found.stage != stage:
        raise PipelineError(
            f"{path}: has the settings of {found.stage}, not of {stage}", hint=AGAIN
        )
    kind = SETTINGS[stage]
    return check_type(found.settings, kind, path, hint=AGAIN), found


def read_mark(path: Path) -> str | None:
    """Read since when a stage's folders are to be made again; None if they are not.

    Raises:
        DocumentError: the file is damaged.
    """
    try:
        found = read_object(path)
    except FileNotFoundError:
        return None
    return check_type(found, SettingsFile, path, hint=AGAIN).rebuild


AGAIN = "`snakemake -n` writes it"


def recipe(stage: str, settings: StageSettings) -> Recipe:
    """Return the recipe of a stage, without its inputs."""
    return Recipe(stage, VERSIONS[stage], settings.recorded(), {})
