"""`zerotrain restore`: what DVC has stored, brought back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from zerotrain.errors import PipelineError


def restore(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="[WEIGHTS|REV]",
            help="A weights file or folder from anywhere, or a branch, tag, commit or experiment; "
            "default: the commit that lies here.",
        ),
    ] = None,
    find_only: Annotated[
        bool, typer.Option("--find-only", help="Tell where WEIGHTS came from; change nothing.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace results that DVC has not stored.")
    ] = False,
) -> None:
    """Bring data, caches, checkpoints and weights back, of this commit, of REV, or of the commit
    that made WEIGHTS. Exit code 1: stages are left to run."""
    from zerotrain.dvc.commits import commit_of, git, move_to
    from zerotrain.dvc.history import find
    from zerotrain.dvc.restore import refuse_running, restore
    from zerotrain.dvc.storage import refuse_without_dvc

    refuse_without_dvc()
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
            hint="`git branch --all`, `git tag` and `dvc exp list` name revisions; `git fetch` "
            "brings those of others",
        )
    if is_file:
        found = find(Path(what or ""))
        print("\n".join(found.lines()), flush=True)
        commit = found.commit
        if find_only:
            return
    refuse_running()
    if commit is None or commit == git("rev-parse", "HEAD").strip():
        raise typer.Exit(0 if restore(force=force) else 1)
    move_to(commit)
    # A process of its own: what is imported here is another commit's code.
    command = [sys.executable, "-m", "zerotrain", "restore", *(["--force"] if force else [])]
    raise typer.Exit(subprocess.run(command, stdin=subprocess.DEVNULL).returncode)
