"""`zerotrain data`: datasets of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

data_app = typer.Typer(help="Datasets of your own.", no_args_is_help=True)


@data_app.callback()
def _data() -> None:
    """Keep the name of a single command a word of its own."""


@data_app.command()
def add(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder of images, or a file of text.")
    ],
) -> None:
    """Let DVC track a dataset, so that git knows which one made what; again after an edit."""
    from zerotrain.dvc.tracking import add

    print("\n".join(add(folder)))
