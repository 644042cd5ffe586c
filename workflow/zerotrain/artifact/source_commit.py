"""The commit of the running source."""

from __future__ import annotations

import subprocess
from pathlib import Path

from zerotrain import __version__

PACKAGE = Path(__file__).parents[1]


def source_commit() -> str | None:
    """Return the commit, with `-dirty` appended if tracked files differ; None outside a repository.

    A package that is installed below another repository is not one of its files.
    """
    if _git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    return _git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def describe_version() -> str:
    """Return the version, with the commit if known, as printed by `zerotrain --version`."""
    commit = source_commit()
    return f"zerotrain {__version__}" + (f" (commit {commit})" if commit else "")


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
