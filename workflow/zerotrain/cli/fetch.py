"""The command for nodes without internet."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer


def fetch(
    configs: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Configs of runs.")],
    to: Annotated[
        Path, typer.Option(metavar="FOLDER", help="A folder that every node sees.")
    ] = Path("fetched"),
) -> None:
    """Put the models that jobs would take from the hub into a shared folder."""
    from zerotrain.fetch import fetch, variables

    os.environ.update(variables(to))  # before the hub's library is imported, which reads it once
    for line in fetch(configs, to):
        print(line)
