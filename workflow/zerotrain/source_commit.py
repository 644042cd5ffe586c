"""The commit of the source that runs."""

from __future__ import annotations

import subprocess

from zerotrain.sources import PACKAGE


def source_commit() -> str | None:
    """The commit, with `-dirty` behind it where tracked files differ; None outside a repository.

    A package that was installed below somebody's repository is none of its files.
    """
    if _git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    return _git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _git(*words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(PACKAGE), *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
    except OSError:
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
