"""The commit that a checkpoint names is that of the source which trained it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from zerotrain.artifact import source_commit


def test_a_commit_is_named_only_of_tracked_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None outside a repository and of files that one only surrounds; edits are marked."""

    def git(*words: str) -> str:
        own = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        done = subprocess.run(
            ["git", "-C", str(tmp_path), *own, *words], check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    package = tmp_path / "package"
    package.mkdir()
    file = package / "__init__.py"
    file.write_text("")
    monkeypatch.setattr(source_commit, "PACKAGE", package)
    assert source_commit.source_commit() is None
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "first")
    assert source_commit.source_commit() is None
    git("add", ".")
    git("commit", "-q", "-m", "second")
    commit = git("rev-parse", "HEAD")
    assert source_commit.source_commit() == commit
    file.write_text("changed = True\n")
    assert source_commit.source_commit() == f"{commit}-dirty"
