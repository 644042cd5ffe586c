"""Which samples a training sees: the same at every number of processes and accumulations."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.builders.phases import SAMPLES, SEED

from zerotrain.data.draws import SampleOrder
from zerotrain.training import loop
from zerotrain.training.reporting.log import NoLog

GLOBAL, STEPS = 8, 7
CPU = torch.device("cpu")


class Engine:
    """One process of several: it counts, and computes nothing."""

    device = CPU
    model = None

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        pass


def seen(world_size: int, accumulations: int) -> list[list[int]]:
    """The samples of each step, of all processes together."""
    micro = GLOBAL // world_size // accumulations
    phase: Any = SimpleNamespace(
        seed=SEED,
        derived=SimpleNamespace(micro_batch_size=micro),
        train=SimpleNamespace(gradient_accumulation_steps=accumulations),
    )
    order = SampleOrder(SEED, [np.arange(SAMPLES)], GLOBAL)
    steps: list[list[int]] = [[] for _ in range(STEPS)]
    for rank in range(world_size):
        for step in range(STEPS):
            taken: list[int] = []

            def batch(first: int, size: int, device: torch.device, into: Any = taken) -> Any:
                into += [order.place(p)[1] for p in range(first, first + size)]
                return {}

            batches: Any = SimpleNamespace(batch=batch)
            objective: Any = SimpleNamespace(loss=lambda model, batch: torch.zeros(micro))
            counter = loop.StepCounter(step, step * GLOBAL, STEPS)
            loop._accumulate(Engine(rank, world_size), objective, batches, phase, counter, NoLog())
            steps[step] += taken
    return [sorted(step) for step in steps]


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("accumulations", [1, 2])
def test_every_world_size_sees_the_same_samples(world_size, accumulations):
    """Step by step the same samples, each once, over more than two epochs; so a training may
    continue with another number of processes."""
    found = seen(world_size, accumulations)
    assert found == seen(1, 1)
    assert sorted(i for step in found[:3] for i in step) == list(range(SAMPLES))
