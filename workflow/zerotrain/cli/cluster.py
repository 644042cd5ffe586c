"""`zerotrain cluster`: the cluster that jobs are sent to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

cluster_app = typer.Typer(help="The cluster that jobs are sent to.", no_args_is_help=True)


@cluster_app.callback()
def _cluster() -> None:
    """Keep the name of a single command a word of its own."""


@cluster_app.command()
def check(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="[CONFIG]", help="A run: whether the cluster can hold its phases."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write a starting profile, as profiles/mine."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a profile.")] = False,
    partition: Annotated[
        str | None, typer.Option(metavar="NAME", help="Where to train; default: it chooses.")
    ] = None,
    account: Annotated[
        str | None, typer.Option(metavar="NAME", help="Whom Slurm bills; default: yours.")
    ] = None,
    no_job: Annotated[bool, typer.Option("--no-job", help="Submit no trial job.")] = False,
    wait: Annotated[
        int, typer.Option(min=1, metavar="SECONDS", help="The trial job may be queued so long.")
    ] = 60,
) -> None:
    """Look at a Slurm cluster from its login node. Exit code 1: a training would not start."""
    from zerotrain.cluster.check import check

    findings, written = check(
        config,
        output,
        force=force,
        partition=partition,
        account=account,
        wait_s=None if no_job else wait,
    )
    problems = [found for found in findings if found.level == "problem"]
    count = len(problems)
    print("\n".join(map(str, findings)))
    print(f"{count} problem{'s' if count > 1 else ''}" if count else "no problem found")
    if written:
        print(f"wrote {written}: snakemake --profile {written.parent} train")
    raise typer.Exit(1 if problems else 0)
