"""`zerotrain restore`: the results of a commit, from DVC's cache or its remote."""

from __future__ import annotations

import subprocess
from pathlib import Path

from zerotrain.artifact.layout import RESULTS, ROLLING
from zerotrain.errors import PipelineError
from zerotrain.graph.dvc.commits import commit_of, find, git, move_to
from zerotrain.graph.dvc.files import LOCK
from zerotrain.training.process.lock import LOCK as TRAINING
from zerotrain.training.process.lock import check_not_locked


def restore(what: str | None, *, find_only: bool = False, force: bool = False) -> None:
    """Bring back the results of a commit.

    Args:
        what: A weights file or folder from anywhere, or a revision; None: the commit that is
            checked out.
        find_only: Whether to stop once the commit of the weights is found.
        force: Whether to replace results that DVC has not stored.

    Raises:
        PipelineError: nothing is recorded, a training is running, or DVC fails.
    """
    commit = _commit(what, find_only=find_only)
    if find_only:
        return
    for path in sorted(RESULTS.glob(f"*/*/{ROLLING}/{TRAINING}")):
        check_not_locked(path.parent)
    if commit and commit != git("rev-parse", "HEAD").strip():
        move_to(commit)
    if not LOCK.is_file():
        raise PipelineError(
            f"{LOCK}: not here, so nothing is recorded that could be brought back",
            hint=f"take a commit that has one: `git log --all -- {LOCK}`",
        )
    forced = ["--force"] if force else []
    # What the cache has needs no remote.
    if _dvc("checkout", "--quiet", *forced, quiet=True) and (code := _dvc("pull", *forced)):
        raise PipelineError(
            f"`dvc pull` ended with code {code}; above it says why",
            hint="docs/remotes.md has the causes; `--force` replaces results that are not stored; "
            "`snakemake` makes what is missing again",
        )
    print("brought back; `snakemake -n` says what is left to do")


def _commit(what: str | None, *, find_only: bool) -> str | None:
    """Return the commit that a word names; None for the one that is checked out."""
    is_file = what is not None and Path(what).exists()
    if find_only and not is_file:
        raise PipelineError(
            f"--find-only: {what or 'nothing'} is no weights file or folder here",
            hint="`zerotrain restore --find-only WEIGHTS`",
        )
    if what is None:
        return None
    commit = commit_of(what)
    if is_file and commit and not find_only:
        raise PipelineError(
            f"{what}: a file or folder here, and a revision of git",
            hint=f"write ./{what} for the one, {commit[:10]} for the other",
        )
    if is_file:
        found = find(Path(what))
        print(found, flush=True)
        return found.commit
    if commit is None:
        raise PipelineError(
            f"{what}: neither a file or folder nor a revision of git",
            hint="`git branch --all` and `git tag` name revisions; `git fetch` brings those of "
            "others",
        )
    return commit


def _dvc(*words: str, quiet: bool = False) -> int:
    """Call DVC and return its exit code.

    Raises:
        PipelineError: it is not installed.
    """
    try:
        return subprocess.run(
            ["dvc", *words],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL if quiet else None,
        ).returncode
    except FileNotFoundError as error:
        raise PipelineError(
            "DVC is not installed, and only DVC knows where stored files are",
            hint="`make setup` installs it into .venv, `pip install dvc` in another environment",
        ) from error
