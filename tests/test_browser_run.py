"""`make test-browser` tests in a browser, or fails: no test of it is skipped."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from tests.conftest import ROOT


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """Commands without a Chromium; Python only says how it was called."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "dirname").symlink_to(shutil.which("dirname"))
    add(folder, "python3", 'echo "$@"')
    return folder


def add(folder: Path, name: str, line: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{line}\n")
    (folder / name).chmod(0o755)


def run(folder: Path) -> subprocess.CompletedProcess[str]:
    """Start the suite where only these commands are found."""
    words = ["/bin/sh", str(ROOT / "tests/browser/run"), "-k", "report"]
    return subprocess.run(words, env={"PATH": str(folder)}, capture_output=True, text=True)


def test_without_a_browser_nothing_is_green(tools: Path) -> None:
    """It says what is missing and what to do, and starts no test."""
    add(tools, "apt-get", "exit 100")
    done = run(tools)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "ERROR: test-browser: chromium is not installed and apt-get could not install it, so "
        "nothing was tested.\n"
        "  Hint: as root on Debian: `apt-get install chromium`; elsewhere put a Chromium of that "
        "name on PATH\n"
    )


def test_the_browser_is_installed_once(tools: Path) -> None:
    """By the first call; every call runs the tests with the given arguments."""
    add(tools, "apt-get", f': > "{tools}/installed"; /bin/chmod 755 "{tools}/chromium"')
    (tools / "chromium").write_text("#!/bin/sh\n")
    for installs in (True, False):
        done = run(tools)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("-m pytest -m browser tests/browser ")
        assert done.stdout.endswith(" -k report\n")
        assert (tools / "installed").exists() == installs
        (tools / "installed").unlink(missing_ok=True)
