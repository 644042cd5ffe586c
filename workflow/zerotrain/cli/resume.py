"""Commands that change how a run continues, or end it: switch, restore, remove."""

from __future__ import annotations

from typing import Annotated

import typer

from zerotrain.graph.options import SwitchOptions


def switch(options: SwitchOptions) -> None:
    """End the phase that trains now, export it, and continue under another launch."""
    from zerotrain.graph.switch.command import switch

    print(switch(options))


def restore(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="[WEIGHTS|REV]",
            help="A weights file or folder from anywhere, or a branch, tag or commit; default: "
            "the commit that lies here.",
        ),
    ] = None,
    find_only: Annotated[
        bool, typer.Option("--find-only", help="Tell where WEIGHTS came from; change nothing.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace results that DVC has not stored.")
    ] = False,
) -> None:
    """Bring back the results of this commit, of REV, or of the commit that made WEIGHTS.

    Data, caches, checkpoints and weights, as `dvc pull` does.
    """
    from zerotrain.graph.dvc.restore import restore

    restore(what, find_only=find_only, force=force)


def remove(
    run: Annotated[
        str,
        typer.Argument(metavar="RUN", help="Name of the run, its config, or results/RUN."),
    ],
    data: Annotated[
        bool,
        typer.Option("--data", help="Also its dataset and caches, unless another run uses them."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Remove it without a question.")] = False,
) -> None:
    """Remove the results of a run, and say what others use or DVC still holds."""
    from zerotrain.graph.remove.command import remove

    print("\n".join(remove(run, data=data, yes=yes)))
