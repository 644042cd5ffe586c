"""The project's commits: what a name means, and moving to it without losing anything."""

from __future__ import annotations

import subprocess

from zerotrain.dvc.storage import some
from zerotrain.errors import PipelineError

KNOWS_RESTORE = "workflow/zerotrain/dvc/restore.py"


def git(*words: str) -> str:
    """What a git command prints.

    Raises:
        PipelineError: git is missing, or refuses; the message is its own.
    """
    try:
        command = ["git", "-c", "core.quotepath=off", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise PipelineError("git is not installed", hint="install git") from error
    if done.returncode:
        said = " ".join(done.stderr.split()).removeprefix("fatal: ").removeprefix("error: ")
        raise PipelineError(
            f"git {words[0]}: {said}", hint="mend that, then call the command again"
        )
    return done.stdout


def commit_of(name: str) -> str | None:
    """The commit that a branch, tag, hash or experiment of DVC stands for; None if nothing has
    that name."""
    try:
        return git(
            "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}"
        ).strip()
    except PipelineError:
        pass
    references = git("for-each-ref", "--format=%(objectname) %(refname)", "refs/exps").splitlines()
    found = [line.split()[0] for line in references if line.endswith(f"/{name}")]
    return found[0] if len(found) == 1 else None


def move_to(commit: str) -> None:
    """Check out a commit, on no branch.

    Raises:
        PipelineError: the work tree has changes that no commit holds, or the commit is older than
            `zerotrain restore`.
    """
    changed = [line[3:] for line in git("status", "--porcelain", "-uno").splitlines()]
    changed += git("ls-files", "--others", "--exclude-standard", "dvc.lock", "*.dvc").splitlines()
    if changed:
        raise PipelineError(
            f"{some(changed)}: changed here and not committed",
            hint="`git commit -a` (and `git add` for new files) or `git stash` first",
        )
    try:
        git("cat-file", "-e", f"{commit}:./{KNOWS_RESTORE}")
    except PipelineError as error:
        raise PipelineError(
            f"{commit[:10]} is of a time before `zerotrain restore`",
            hint=f"by hand: `git checkout {commit[:10]}` and `dvc pull`; snakemake may then run "
            "stages again",
        ) from error
    git("checkout", "--quiet", "--detach", commit)
    # Not `git switch -`: it goes to branches alone.
    print(f"at {described(commit)}; `git checkout -` goes back")


def described(commit: str) -> str:
    """A commit's short hash, date and subject."""
    return git("show", "--no-patch", "--format=%h of %cs, %s", commit).strip()
