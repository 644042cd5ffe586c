"""zerotrain cache: show, prune, verify."""

from __future__ import annotations

from typing import Annotated

import typer

from zerotrain.config.command_options import RUN_HELP

cache_app = typer.Typer(
    name="cache", help="Encoded samples: what they take, and are they whole.", no_args_is_help=True
)

Caches = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN|FOLDER]", help=f"{RUN_HELP} Or a cache; default: all of the project."
    ),
]


@cache_app.command()
def show(caches: Caches = None) -> None:
    """Show samples, sizes, bytes on disk, orphans, what encoded them, and the runs on it."""
    from zerotrain.run.caches import find_caches, show

    for place in find_caches(caches):
        print("\n".join(show(place)))


@cache_app.command()
def prune(
    caches: Caches = None,
    unfinished: Annotated[
        bool,
        typer.Option("--unfinished", help="Also what an interrupted encoding would continue from."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be removed.")
    ] = False,
) -> None:
    """Remove what no sample needs now: it is encoded again if an edit brings it back."""
    from zerotrain.run.caches import find_caches, prune

    for place in find_caches(caches):
        print("\n".join(prune(place, unfinished=unfinished, dry_run=dry_run)))


@cache_app.command()
def verify(caches: Caches = None) -> None:
    """Hash every shard, and list damage by sample. Exit code 1: a cache is not whole."""
    from zerotrain.run.caches import find_caches, verify

    verdicts = [verify(place) for place in find_caches(caches)]
    for verdict in verdicts:
        print("\n".join(verdict.lines))
    raise typer.Exit(0 if all(verdict.whole for verdict in verdicts) else 1)
