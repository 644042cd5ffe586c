"""One call of a stage: its settings, its recipe, and whether its folders are current already.

Snakemake runs each job whose input was made again, and mostly the input is what it was: such a job
publishes its folders again, and takes no longer than its start.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerotrain.artifact import MANIFEST, read_manifest
from zerotrain.artifact.damage import find_damage
from zerotrain.artifact.recipe import Recipe, differences, recipe_of
from zerotrain.config import settings_file
from zerotrain.errors import PipelineError
from zerotrain.graph.currency import restore_files
from zerotrain.graph.files import digests
from zerotrain.machine.disk_errors import writing


@dataclass(frozen=True)
class StageJob:
    """What a stage is called with."""

    settings: Any
    """Its class in zerotrain.config.stage_settings.SETTINGS."""
    recipe: Recipe
    rebuild: bool
    """Whether its folders are made again even if they are current."""

    @classmethod
    def read(
        cls, stage: str, file: Path, output: Path, inputs: Mapping[str, Path | None]
    ) -> StageJob:
        """Read a stage's settings file, and compute its recipe.

        Args:
            stage: Its name.
            file: Its settings file.
            output: The first folder that it publishes.
            inputs: The folders whose identities are in the recipe, by name.

        Raises:
            PipelineError: the settings file is damaged, or an input is missing.
        """
        settings, found = settings_file.read_settings(file, stage)
        read = {name: read_manifest(folder, None) for name, folder in inputs.items() if folder}
        identities = {name: one.identity for name, one in read.items()}
        known = {**identities, **digests(settings, output)}
        recipe = settings_file.recipe(stage, settings).with_inputs(known)
        return cls(settings, recipe, rebuild=found.rebuild is not None)

    def keep(self, *folders: Path, copies: Mapping[Path, Path] | None = None) -> bool:
        """Publish the folders again as they are, if all are current.

        Args:
            folders: The folders that the stage publishes together.
            copies: Files that the stage writes outside of its folders, with their copies inside.

        Returns:
            Whether there is nothing else to do.
        """
        if self.rebuild or not all(map(self._is_current, folders)):
            return False
        restore_files(copies or {})
        files = [*(copies or {}), *(folder / MANIFEST for folder in folders)]
        if not all(path.is_file() for path in files):
            return False
        for path in files:
            with writing(path):
                os.utime(path)
        print(f"{', '.join(map(str, folders))}: current, kept")
        return True

    def _is_current(self, folder: Path) -> bool:
        try:
            found = read_manifest(folder, None)
            if differences(recipe_of(found), self.recipe):
                return False
        except PipelineError:
            return False
        return not any(find_damage(folder, found.files, None))
