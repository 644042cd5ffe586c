"""The command that writes the configurations of a sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def sweep(
    config: Annotated[Path, typer.Argument(metavar="FILE", help="The config that runs vary.")],
    settings: Annotated[
        list[str],
        typer.Option("--set", metavar="KEY=VALUE,VALUE", help="Values of a key; repeatable."),
    ],
    output: Annotated[
        Path, typer.Option(metavar="FOLDER", help="For a file each run, and FOLDER.yaml for all.")
    ],
) -> None:
    """Write a configuration for each point of a grid, and one that plans them all."""
    from zerotrain.sweep import sweep

    together, *files = sweep(config, settings, output)
    print(f"wrote {len(files)} runs to {output}; all of them:")
    print(f"  snakemake --cores all train --configfile {together}")
