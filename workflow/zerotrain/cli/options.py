"""Arguments and options that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def folder_of(text: str) -> Path:
    """A folder, also where its manifest.json is named, as the rules do."""
    path = Path(text)
    return path.parent if path.name == "manifest.json" else path


def folder_option(help: str) -> typer.models.OptionInfo:
    """An option that takes a folder."""
    option: typer.models.OptionInfo = typer.Option(parser=folder_of, metavar="FOLDER", help=help)
    return option


ConfigFile = Annotated[Path, typer.Option("--config", metavar="FILE", help="The run's config.")]
PhaseName = Annotated[str, typer.Option("--phase", help="Name of the phase.")]
Dataset = Annotated[Path, folder_option("Dataset folder.")]
Base = Annotated[Path, folder_option("Base model folder.")]
Cache = Annotated[Path, folder_option("Cache folder.")]
Launch = Annotated[Path, folder_option("Launch folder.")]
Weights = Annotated[Path, folder_option("Weights folder.")]
State = Annotated[Path, folder_option("State folder.")]
Output = Annotated[Path, folder_option("Folder to publish.")]
