"""The project's commits: resolve a revision, and move to it without losing changes."""

from __future__ import annotations

import subprocess

from zerotrain.config.suggestions import join_first
from zerotrain.errors import PipelineError

KNOWS_RESTORE = (
    "workflow/zerotrain/pipeline/dvc/restore.py",
    "workflow/zerotrain/dvc/restore.py",  # in earlier versions
)


def git(*words: str) -> str:
    """Return what a git command prints.

    Raises:
        PipelineError: git is missing or fails; the message is git's.
    """
    try:
        command = ["git", "-c", "core.quotepath=off", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise PipelineError("git is not installed", hint="install git") from error
    if done.returncode:
        failure = " ".join(done.stderr.split()).removeprefix("fatal: ").removeprefix("error: ")
        raise PipelineError(
            f"git {words[0]}: {failure}", hint="fix that, then run the command again"
        )
    return done.stdout


def commit_of(name: str) -> str | None:
    """Return the commit of a branch, tag, hash or DVC experiment; None if not found."""
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
    """Check out a commit with a detached HEAD.

    Raises:
        PipelineError: the work tree has uncommitted changes, or the commit predates `zerotrain
            restore`.
    """
    changed = [line[3:] for line in git("status", "--porcelain", "-uno").splitlines()]
    changed += git("ls-files", "--others", "--exclude-standard", "dvc.lock", "*.dvc").splitlines()
    if changed:
        raise PipelineError(
            f"{join_first(changed, 3)}: changed here and not committed",
            hint="`git commit -a` (and `git add` for new files) or `git stash` first",
        )
    if not git("ls-tree", "--name-only", commit, "--", *KNOWS_RESTORE):
        raise PipelineError(
            f"{commit[:10]} is of a time before `zerotrain restore`",
            hint=f"by hand: `git checkout {commit[:10]}` and `dvc pull`; snakemake may then run "
            "stages again",
        )
    git("checkout", "--quiet", "--detach", commit)
    # `git switch -` works only for branches.
    print(f"at {described(commit)}; `git checkout -` goes back")


def described(commit: str) -> str:
    """Return a commit's short hash, date and subject."""
    return git("show", "--no-patch", "--format=%h of %cs, %s", commit).strip()
