"""Runs of a family whose encoders are arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.builders.caching import FakeFamily, Run, load_fake_family


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> FakeFamily:
    """The family that the stage loads."""
    return load_fake_family(monkeypatch)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run with twenty images."""
    return Run(tmp_path)
