"""Checkpoints as DeepSpeed and accelerate really write them, made in forked processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.builders.processes import Job, run_ranks


def _leave(job: Job, *arguments: Any) -> None:
    torch.set_num_threads(1)
    job(*arguments)
    os._exit(0)  # gloo's threads may wait for ranks that have ended


@pytest.fixture(scope="session")
def ranks(server: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    """Run a job in `world` processes of one gloo group; an error shows what they said."""

    def run(job: Job, *arguments: Any, world: int = 1) -> None:
        output = tmp_path_factory.mktemp("ranks") / "output.txt"
        run_ranks(server.Process, _leave, world, job, *arguments, output=output, seconds=70)

    return run


@pytest.fixture(scope="session")
def made(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A DeepSpeed checkpoint of `maker.train_zero`, made once per combination of its options.

    The folder holds `checkpoint/`, and `expected.pt`: what the live engine and zero_to_fp32 say.
    """
    from tests.foreign import maker

    done: dict[str, Path] = {}

    def make(stage: int, world: int = 1, **options: Any) -> Path:
        key = f"{stage}-{world}-{sorted(options.items())}"
        if key not in done:
            done[key] = tmp_path_factory.mktemp("made")
            ranks(maker.train_zero, done[key], stage, options, world=world)
        return done[key]

    return make
