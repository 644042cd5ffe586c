"""An engine that only holds tensors, and the saving of what it holds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tests.builders.phases import make_tiny_phase

from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.state.checkpoint import Checkpoint, Fragment
from zerotrain.state.position import MASTER
from zerotrain.training.checkpointing.progress_folder import step_folder
from zerotrain.training.checkpointing.saving import Saving
from zerotrain.training.optim.optimizer import ParamGroup
from zerotrain.training.reporting import log as reporting

SIZE = 1000


class Log(reporting.NoLog):
    """Keeps what is reported to it."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def write_records(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "said.json").write_text(json.dumps(self.said))


class Engine:
    """Holds three tensors, which a step adds one to."""

    rank, world_size, device = 0, 1, torch.device("cpu")
    steady = True

    def __init__(self) -> None:
        self.held = {name: torch.zeros(SIZE) for name in "abc"}
        self.shapes = {name: [SIZE] for name in self.held}
        self.groups = [ParamGroup(list(self.held), 1.0, 0.0)]
        self.updates = 0

    def step(self) -> None:
        self.updates += 1
        for tensor in self.held.values():
            tensor += 1

    def fragments(self) -> Iterator[Fragment]:
        for name, tensor in self.held.items():
            yield Fragment(name, 0, {MASTER: tensor})

    def slots(self) -> list[str]:
        return []

    def scalars(self) -> list[dict[str, float]]:
        return [{}]

    def optimizer_step(self) -> int:
        return self.updates

    def loss_scale(self) -> None:
        return None

    def describe(self) -> dict[str, Any]:
        return {}


def phase(**changes: Any) -> ResolvedPhase:
    """A phase of a hundred steps."""
    plain = make_tiny_phase("a", "torch", 100).with_values(optimizer="sgd", lr_scheduler="constant")
    return plain.with_values(**changes)


def made(engine: Any, folder: Path, log: Log | None = None, **changes: Any) -> Saving:
    """The saving of a phase into a folder."""
    folder.mkdir(exist_ok=True)
    return Saving(engine, phase(**changes), log or Log(), folder)


def values(folder: Path, step: int) -> dict[str, float]:
    """The one value of each tensor of a checkpoint."""
    found = Checkpoint(step_folder(folder, step))
    assert found.position.step == step
    whole = {name: found.tensor(name, MASTER) for name in found.names}
    assert all(tensor.eq(tensor[0]).all() for tensor in whole.values())
    return {name: float(tensor[0]) for name, tensor in whole.items()}
