"""Nano language models, and runs of a family whose encoders are arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.builders.caching import family, run  # noqa: F401  (fixtures)
from tests.builders.talks import publish_language


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Published bases of both families."""
    folder = tmp_path_factory.mktemp("bases")
    return {name: publish_language(name, folder / name) for name in ("causal_lm", "seq2seq_lm")}
