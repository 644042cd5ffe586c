"""What each process reads of a checkpoint when it resumes, counted by the kernel."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tests.builders.phases import make_tiny_phase
from tests.builders.processes import run_ranks

from zerotrain.config.launch import LaunchConfig
from zerotrain.launch.derive import with_files
from zerotrain.launch.files import write_launch_files
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.models.sizes import model_sizes
from zerotrain.state.position import StepCounter
from zerotrain.training import setup
from zerotrain.training.checkpointing.progress_folder import step_folder
from zerotrain.training.checkpointing.saving import Saving
from zerotrain.training.engines.ema import EMA
from zerotrain.training.engines.engine import Engine
from zerotrain.training.reporting.log import NoLog

COUNTS = "bytes"
"""Folder of each process's figures."""


def model(width: int, layers: int) -> torch.nn.Module:
    """Square layers with biases, drawn by a seed."""
    torch.manual_seed(1)
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))


def write_launch(folder: Path, preset: str, ranks: int, own: torch.nn.Module) -> ResolvedPhase:
    """Write the launch files of a preset for a model; the phase, which keeps an average."""
    sizes = model_sizes({name: list(p.shape) for name, p in own.named_parameters()})
    changes: dict[str, Any] = {
        "num_processes": ranks,
        "micro_batch_size": 1,
        "use_ema": True,
        "sources": {"lr_scheduler_steps": ("default", "")},
    }
    plain = make_tiny_phase("a", preset, 2)
    phase = with_files(plain.with_values(**changes), LaunchConfig(), sizes)
    folder.mkdir(parents=True)
    write_launch_files(phase, folder, folder)
    return phase


def held(engine: Engine, ema: EMA | None) -> dict[str, tuple[int, dict[str, Any]]]:
    """Every tensor of this process by name, with its start."""
    source = ema or engine
    return {
        f.name: (f.start, {slot: part.detach().cpu().clone() for slot, part in f.slots.items()})
        for f in source.fragments()
    }


def called() -> int:
    """Bytes that this process has read by calls so far."""
    lines = Path("/proc/self/io").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))


def mapped(folder: Path) -> int:
    """Bytes of a folder's files that this process has read by mapping them."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if not line.split()[0].endswith(":"):
            ours = str(folder) in line
        elif ours and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


def _resume(ranks: int, preset: str, width: int, layers: int, folder: Path) -> None:
    """Train one step, save it, and resume; leave the bytes that were read and those of its own."""
    number = os.environ["RANK"]
    torch.set_num_threads(1)
    launch = folder / f"launch{number}"
    phase = write_launch(launch, preset, ranks, model(width, layers))
    family: Any = SimpleNamespace(load_model=lambda base: model(width, layers))
    progress = folder / "progress"
    progress.mkdir(exist_ok=True)
    first = setup.set_up_phase(phase, family, launch, folder, None, None, None)
    with first.engine.micro_batch(last=True):
        first.engine.backward(first.engine.model(torch.ones(1, width)).square().mean())
    first.engine.step(1e-3)
    assert first.ema
    first.ema.update(1)
    Saving(first.engine, phase, NoLog(), progress, first.ema).begin(StepCounter(1, 1, 2), wait=True)
    expected = held(first.engine, first.ema)
    if phase.derived.engine == "deepspeed":
        first.engine.model.destroy()  # type: ignore[operator]

    sources: list[Any] = []  # what is mapped counts for as long as it is held
    real = setup.Checkpoint

    def hold(*words: Any, **keys: Any) -> Any:
        sources.append(real(*words, **keys))
        return sources[-1]

    setup.Checkpoint = hold  # type: ignore[assignment,misc]
    before = called()
    second = setup.set_up_phase(phase, family, launch, folder, None, step_folder(progress, 1), None)
    read = called() - before + mapped(progress)
    found = held(second.engine, second.ema)
    assert found.keys() == expected.keys()
    for name, (start, slots) in expected.items():
        assert found[name][0] == start
        assert found[name][1].keys() == slots.keys()
        assert all(torch.equal(slots[slot], found[name][1][slot]) for slot in slots), name
    whole = sum(4 * p.numel() for p in model(width, layers).parameters())
    own = sum(part.nbytes for _, slots in expected.values() for part in slots.values())
    if phase.derived.engine == "torch":  # every process steps all: only the average is shared out
        own = 3 * whole + sum(slots["ema"].nbytes for _, slots in expected.values())
    (folder / COUNTS).mkdir(exist_ok=True)
    figures = {"read": read, "share": own, "state": 4 * whole}
    (folder / COUNTS / f"{number}.json").write_text(json.dumps(figures))
    os._exit(0)  # gloo's threads need not be waited for


def count(
    start: Any, preset: str, ranks: int, width: int, layers: int, folder: Path
) -> list[dict[str, int]]:
    """Train, save and resume under a preset; each process's figures.

    Args:
        start: Makes a process, as multiprocessing's Process does.
        preset: The preset.
        ranks: Processes, of one thread each.
        width: Of the model's layers.
        layers: Their number.
        folder: Where it is done.
    """
    words = (ranks, preset, width, layers, folder)
    run_ranks(start, _resume, ranks, *words, output=folder / "output.txt")
    return [json.loads((folder / COUNTS / f"{n}.json").read_text()) for n in range(ranks)]
