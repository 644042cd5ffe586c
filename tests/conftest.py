"""What every test may rely on."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from zerotrain import compiled_ops


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fix", action="store_true", help="write generated files again instead of comparing them"
    )


def pytest_configure() -> None:
    """Let DeepSpeed find its compiled ops, as training does: no test compiles anything."""
    os.environ.update(compiled_ops.environment())


@pytest.fixture
def generated(request: pytest.FixtureRequest) -> Callable[[Path, str], None]:
    """Hold a generated file to the text it should have; with --fix it is written."""

    def hold(path: Path, text: str) -> None:
        if request.config.getoption("--fix"):
            path.write_text(text)
        assert path.read_text() == text, f"{path} is out of date: make test ARGS=--fix"

    return hold
