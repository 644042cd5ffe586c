"""The files of users that a stage reads: their digest is an input of its recipe.

They are no inputs of rules, as a mere `touch` would rerun jobs. Large files are hashed again only
when they have changed on this disk (zerotrain.artifact.verdicts).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from zerotrain.artifact import digest, file_sha256
from zerotrain.artifact.recipe import UNKNOWN
from zerotrain.artifact.verdicts import remembering
from zerotrain.config.section import ConditionedPrompt
from zerotrain.config.stage_settings import (
    BuildSettings,
    CacheSettings,
    EvaluateSettings,
    ImportSettings,
    LaunchSettings,
    PrepareSettings,
    StageSettings,
)
from zerotrain.data.conditioning import prompt_files
from zerotrain.data.files import DatasetFiles
from zerotrain.data.open import source_files
from zerotrain.models.base_places import local_folders
from zerotrain.state.checkpoint_path import find_checkpoint, optimizers_beside

PRESETS = Path("config/launch")


def digests(settings: StageSettings, folder: Path) -> dict[str, str]:
    """Return the digest of each group of files that a stage reads outside of results/.

    That of a group without files is UNKNOWN: it may be on a disk that is not there now.

    Args:
        settings: The stage's settings.
        folder: The folder that it publishes; next to a dataset's manifest is a listing of its
            files, which spares hashing them.

    Raises:
        PipelineError: a folder or file that the settings name cannot be used.
    """
    if isinstance(settings, PrepareSettings) and settings.data.has_image_files:
        return {"files": DatasetFiles(settings.data, folder).update()}
    groups = files_of(settings).items()
    return {name: _digest(files) if files else UNKNOWN for name, files in groups}


def files_of(settings: StageSettings) -> dict[str, list[str]]:
    """List the files that a stage reads outside of results/, by group."""
    if isinstance(settings, PrepareSettings):
        return {"files": source_files(settings.data)}
    if isinstance(settings, BuildSettings):
        return {"model": [] if settings.is_preset else _files_of_base(settings.base)}
    if isinstance(settings, CacheSettings):
        return {"images": _prompt_images(settings.validation_prompts)}
    if isinstance(settings, EvaluateSettings):
        images = settings.evaluate.conditioning_images or []
        return {"images": prompt_files(images, "evaluate.conditioning_images")}
    if isinstance(settings, LaunchSettings):
        return {"preset": preset_files(settings.phases[-1].launch.preset)}
    if isinstance(settings, ImportSettings):
        return _external(settings)
    return {}


def preset_files(preset: str) -> list[str]:
    """List the file of a launch preset; for `auto` all that it chooses from."""
    if preset == "auto":
        return sorted(str(path) for path in PRESETS.glob("*.yaml"))
    return [str(PRESETS / f"{preset}.yaml")]


def _prompt_images(prompts: Sequence[str | ConditionedPrompt]) -> list[str]:
    found = [files for _, files in (one for one in prompts if not isinstance(one, str))]
    return prompt_files(found, "validation.conditioning_images")


def _files_of_base(base: str) -> list[str]:
    """List the files of the folders that a base names."""
    file = Path(base).expanduser()
    found = [path for folder in local_folders(base) for path in _below(folder)]
    return [*found, *([str(file)] if file.is_file() else [])]


def _external(settings: ImportSettings) -> dict[str, list[str]]:
    """List the files of an external checkpoint."""
    resume = settings.resume_from_checkpoint
    if resume is None:
        return {}
    path = find_checkpoint(Path(resume.folder).expanduser())
    own = [str(path), *map(str, optimizers_beside(path))] if path.is_file() else _below(path)
    names = [] if resume.names in (None, "module") else [os.path.expanduser(str(resume.names))]
    return {"checkpoint": own, "names": names}


def _below(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*") if path.is_file())


def _digest(files: Sequence[str]) -> str:
    """Compute the digest of files by name and content; a missing one counts as missing."""
    sha256 = remembering(file_sha256)
    names = [os.path.basename(file) for file in files]
    hashes = [sha256(Path(file)) if os.path.isfile(file) else None for file in files]
    return digest([*zip(names, hashes, strict=True)])
