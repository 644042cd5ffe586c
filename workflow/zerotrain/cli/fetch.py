"""The command for nodes without internet."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer


def fetch(
    configs: Annotated[list[Path], typer.Argument(metavar="CONFIG...", help="Configs of runs.")],
    to: Annotated[
        Path, typer.Option(metavar="FOLDER", help="A folder that every node sees.")
    ] = Path("fetched"),
    wheels: Annotated[
        bool, typer.Option("--wheels", help="The pinned packages, too: 0.5 GB, with CUDA several.")
    ] = False,
) -> None:
    """Put what jobs would take from the internet into a shared folder: models, datasets, ops."""
    from zerotrain.fetch import fetch, variables

    os.environ.update(variables(to))  # before the hub's library is imported, which reads it once
    for line in fetch(configs, to, wheels=wheels):
        print(line, flush=True)
