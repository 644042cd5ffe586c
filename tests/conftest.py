"""What every test may rely on."""

from __future__ import annotations

import multiprocessing
import os
import sys
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


@pytest.fixture(scope="session")
def server() -> multiprocessing.context.ForkServerContext:
    """Forks processes that need not import torch, diffusers and DeepSpeed again.

    A process has one such server, so that all tests share what it preloads.
    """
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
    # Forks import test modules by their names, which `pytest`, unlike `python -m pytest`, hides.
    sys.path.append(str(Path(__file__).parents[1]))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    return context


@pytest.fixture
def generated(request: pytest.FixtureRequest) -> Callable[[Path, str], None]:
    """Hold a generated file to the text it should have; with --fix it is written."""

    def hold(path: Path, text: str) -> None:
        if request.config.getoption("--fix"):
            path.write_text(text)
        assert path.read_text() == text, f"{path} is out of date: make test ARGS=--fix"

    return hold
