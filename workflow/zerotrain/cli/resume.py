"""Commands that change how a run continues, or end it: switch, restore, remove."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from zerotrain.errors import PipelineError
from zerotrain.pipeline.options import SwitchOptions


def switch(options: SwitchOptions) -> None:
    """End the phase that trains now, export it, and continue under another launch."""
    from zerotrain.pipeline.switch.command import switch

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

    Data, caches, checkpoints and weights. Exit code 1: stages are left to run.
    """
    from zerotrain.pipeline.dvc.commits import commit_of, find, git, move_to
    from zerotrain.pipeline.dvc.restore import check_nothing_runs, restore
    from zerotrain.pipeline.dvc.storage import check_dvc_is_set_up

    check_dvc_is_set_up()
    is_file = what is not None and Path(what).exists()
    if find_only and not is_file:
        raise PipelineError(
            f"--find-only: {what or 'nothing'} is no weights file or folder here",
            hint="`zerotrain restore --find-only WEIGHTS`",
        )
    commit = commit_of(what) if what else None
    if what and is_file and commit and not find_only:
        raise PipelineError(
            f"{what}: a file or folder here, and a revision of git",
            hint=f"write ./{what} for the one, {commit[:10]} for the other",
        )
    if what and not is_file and commit is None:
        raise PipelineError(
            f"{what}: neither a file or folder nor a revision of git",
            hint="`git branch --all` and `git tag` name revisions; `git fetch` brings those of "
            "others",
        )
    if is_file:
        found = find(Path(what or ""))
        print("\n".join(found.lines()), flush=True)
        commit = found.commit
        if find_only:
            return
    check_nothing_runs()
    if commit is None or commit == git("rev-parse", "HEAD").strip():
        raise typer.Exit(0 if restore(force=force) else 1)
    move_to(commit)
    # A process of its own: what is imported here is another commit's code.
    command = [sys.executable, "-m", "zerotrain", "restore", *(["--force"] if force else [])]
    raise typer.Exit(subprocess.run(command, stdin=subprocess.DEVNULL).returncode)


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
    from zerotrain.pipeline.remove.command import remove

    print("\n".join(remove(run, data=data, yes=yes)))
