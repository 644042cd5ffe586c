"""Git repositories."""

from __future__ import annotations

from collections.abc import Callable


def init_repository(run: Callable[..., object]) -> None:
    """Make a repository with a branch `main`, in which `run` may commit."""
    run("git", "init", "-q", "-b", "main", ".")
    set_author(run)


def set_author(run: Callable[..., object]) -> None:
    """Let git know who commits."""
    run("git", "config", "user.name", "a")
    run("git", "config", "user.email", "a@b")
