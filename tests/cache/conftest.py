"""Nano language models, and runs of a family whose encoders are arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.builders.caching import FakeFamily, Run, load_fake_family
from tests.builders.talks import publish_language


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Published bases of both families."""
    folder = tmp_path_factory.mktemp("bases")
    return {name: publish_language(name, folder / name) for name in ("causal_lm", "seq2seq_lm")}


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> FakeFamily:
    """The family that the stage loads."""
    return load_fake_family(monkeypatch)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run with twenty images."""
    return Run(tmp_path)
