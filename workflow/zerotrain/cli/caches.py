"""zerotrain cache: show, prune, verify."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zerotrain.config.command_options import folder_of

cache_app = typer.Typer(
    name="cache", help="Encoded samples: what they take, and are they whole.", no_args_is_help=True
)

CacheFolder = Annotated[
    Path | None,
    typer.Argument(
        metavar="[FOLDER]", parser=folder_of, help="A cache; default: all of the project."
    ),
]
OfConfig = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="The caches of this run, or runs.")
]


@cache_app.command()
def show(folder: CacheFolder = None, config: OfConfig = None) -> None:
    """Show samples, sizes, bytes on disk, orphans, what encoded them, and the runs on it."""
    from zerotrain.pipeline.caches import find_caches, show

    for place in find_caches(folder, config):
        print("\n".join(show(place)))


@cache_app.command()
def prune(
    folder: CacheFolder = None,
    config: OfConfig = None,
    unfinished: Annotated[
        bool,
        typer.Option("--unfinished", help="Also what an interrupted encoding would continue from."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be removed.")
    ] = False,
) -> None:
    """Remove what no sample needs now: it is encoded again if an edit brings it back."""
    from zerotrain.pipeline.caches import find_caches, prune

    for place in find_caches(folder, config):
        print("\n".join(prune(place, unfinished=unfinished, dry_run=dry_run)))


@cache_app.command()
def verify(folder: CacheFolder = None, config: OfConfig = None) -> None:
    """Hash every shard, and list damage by sample. Exit code 1: a cache is not whole."""
    from zerotrain.pipeline.caches import find_caches, verify

    verdicts = [verify(place) for place in find_caches(folder, config)]
    for verdict in verdicts:
        print("\n".join(verdict.lines))
    raise typer.Exit(0 if all(verdict.whole for verdict in verdicts) else 1)
