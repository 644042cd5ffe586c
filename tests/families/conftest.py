"""Small models for the tests of families."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.builders.images import build_nano


@pytest.fixture(scope="session")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A nano model for 16 px images whose autoencoder is fitted for a few steps."""
    return build_nano("sdxl", tmp_path_factory.mktemp("nano") / "base")


@pytest.fixture(scope="session")
def nano_sd3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A nano SD3, likewise."""
    return build_nano("sd3", tmp_path_factory.mktemp("nano_sd3") / "base")


@pytest.fixture(scope="session")
def nano_flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A nano Flux, likewise."""
    return build_nano("flux", tmp_path_factory.mktemp("nano_flux") / "base")


@pytest.fixture(scope="session")
def nano_qwen_image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A nano Qwen-Image, likewise."""
    return build_nano("qwen_image", tmp_path_factory.mktemp("nano_qwen") / "base")
