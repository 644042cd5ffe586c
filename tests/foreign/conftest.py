"""Checkpoints as DeepSpeed and accelerate really write them, made in forked processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.builders.processes import Job, run_ranks
from torch import nn

from zerotrain.state.external import open_external
from zerotrain.state.external.fitting import ModelOrder, fit


def _leave(job: Job, *arguments: Any) -> None:
    torch.set_num_threads(1)
    job(*arguments)
    os._exit(0)  # gloo's threads may wait for ranks that have ended


@pytest.fixture(scope="session")
def ranks(server: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    """Run a job in `world` processes of one gloo group; an error shows what they printed."""

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


class Net(nn.Module):
    """Equal layers between norms: shapes repeat, as in every real model."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.input_layernorm = nn.LayerNorm(4)
        self.second = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.norm(self.second(self.input_layernorm(self.first(rows)).tanh()))


NAMES = [f"{layer}.{kind}" for layer in ("first", "input_layernorm", "second", "norm")
         for kind in ("weight", "bias")]  # fmt: skip
DECAYED = ["first.weight", "second.weight"]
SPARED = [name for name in NAMES if name not in DECAYED]


def trained_there(folder: Path, groups: Callable[[dict[str, Any]], Any], frozen: str = "") -> Net:
    """Three steps of AdamW, saved as accelerate does; the model with its moments by our names."""
    torch.manual_seed(0)
    model = Net()
    own = dict(model.named_parameters())
    for name, parameter in own.items():
        parameter.requires_grad_(not (frozen and name.startswith(frozen)))
    optimizer = torch.optim.AdamW(groups(own), lr=0.1)
    for _ in range(3):
        model(torch.randn(8, 4)).pow(3).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    folder.mkdir()
    save_file({n: t.detach().clone() for n, t in own.items()}, folder / "model.safetensors")
    torch.save(optimizer.state_dict(), folder / "optimizer.bin")
    model.moments = {n: optimizer.state[p] for n, p in own.items() if p in optimizer.state}
    return model


def shapes(model: nn.Module) -> dict[str, list[int]]:
    """Of the trained parameters, in the model's order."""
    return {n: list(p.shape) for n, p in model.named_parameters() if p.requires_grad}


def read(folder: Path, model: nn.Module, order: ModelOrder | None = None) -> Any:
    """The checkpoint under our names; frozen parameters are the base's."""
    held = {n: p.detach() for n, p in model.named_parameters()}
    return fit(open_external(folder), shapes(model), held.get, order=order)


def assert_moments(found: Any, model: Any) -> None:
    """Each trained parameter has its own moments, bit by bit."""
    assert found.slots == ["master", "exp_avg", "exp_avg_sq"], found.lost
    for name in found.names:
        for slot in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(found.tensor(name, slot), model.moments[name][slot]), (name, slot)


def decay_split(own: dict[str, Any]) -> Any:
    """As HF's Trainer has it: what decays, then norms and biases."""
    return [
        {"params": [own[n] for n in DECAYED], "weight_decay": 0.1},
        {"params": [own[n] for n in SPARED], "weight_decay": 0.0},
    ]
