"""Commands as a user runs them, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

Done = subprocess.CompletedProcess[str]


def run_zerotrain(*words: object, folder: Path | None = None, **environment: str) -> Done:
    """Run `zerotrain`, whether or not it ends well."""
    return subprocess.run(
        [sys.executable, "-m", "zerotrain", *map(str, words)],
        cwd=folder, env={**os.environ, "COLUMNS": "100", **environment}, capture_output=True,
        text=True,
    )  # fmt: skip


def run_in_project(folder: Path, *words: object) -> str:
    """What a Python module prints, with a copy of the project's own package; it ends well."""
    done = subprocess.run(
        [sys.executable, "-m", *map(str, words)],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(folder / "workflow")}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=1500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout
