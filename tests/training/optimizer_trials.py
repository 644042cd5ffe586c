"""A model of some 100 weights that every engine trains with every optimizer, in one process each.

The parameters have odd sizes, the biases are a group with a rate and a decay of their own, and a
checkpoint is written and read as in a training.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tests.builders.phases import make_tiny_phase
from tests.builders.processes import run_ranks
from tests.training.conftest import TINY

from zerotrain.config.launch import LaunchConfig
from zerotrain.launch.derive import with_files
from zerotrain.launch.files import write_launch_files
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.models.sizes import model_sizes
from zerotrain.state.checkpoint import Checkpoint
from zerotrain.state.position import MASTER, StepCounter
from zerotrain.state.state import State
from zerotrain.training.checkpointing import preflight
from zerotrain.training.checkpointing.progress_folder import step_folder
from zerotrain.training.checkpointing.saving import Saving
from zerotrain.training.reporting.log import NoLog
from zerotrain.training.setup import build_engine

HALF, STEPS = 4, 8
"""A checkpoint is written in the middle and at the end."""


@dataclass(frozen=True)
class Job:
    """One training: from its start, or from a checkpoint or a state in the middle."""

    name: str
    phase: ResolvedPhase
    start: Path | None = None


def trial_phase(optimizer: str, preset: str, processes: int = 1, **changes: Any) -> ResolvedPhase:
    """A phase of the small model; biases learn at half the rate, without decay."""
    rate = 1e-2
    biases = {"parameters": ["bias"], "learning_rate": rate / 2, "adam_weight_decay": 0.0}
    phase = make_tiny_phase("a", preset, STEPS)
    return phase.with_values(
        optimizer=optimizer, num_processes=processes, learning_rate=rate,
        micro_batch_size=4 // processes, lr_scheduler="linear", lr_scheduler_steps=20,
        max_grad_norm=0.0, param_groups=[biases], **changes,
    )  # fmt: skip


class Model(torch.nn.Sequential):
    """A convolution, whose weights are no matrix, and two linear layers."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(
            torch.nn.Unflatten(1, (1, 5)), torch.nn.Conv1d(1, 3, 3), torch.nn.Tanh(),
            torch.nn.Flatten(), torch.nn.Linear(9, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3),
        )  # fmt: skip


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Four samples, and what the model should make of them."""
    source = torch.Generator().manual_seed(step)
    return torch.randn(4, 5, generator=source), torch.randn(4, 3, generator=source)


def rate(step: int) -> float:
    """The learning rate of a step."""
    return 1e-2 * (1 - step / 20)


def train(job: Job, folder: Path, rank: int) -> list[float]:
    """Train from the job's start to the last step; the losses."""
    phase, processes = job.phase, job.phase.launch.num_processes
    launch = folder / job.name / f"launch{rank}"
    launch.mkdir(parents=True)
    model = Model()
    sizes = model_sizes({name: list(p.shape) for name, p in model.named_parameters()})
    # Each parameter is a sub-group.
    zero = {**TINY, "sub_group_size": 5} if phase.derived.zero_stage == 3 else {}
    own = LaunchConfig(deepspeed={"zero_optimization": zero} if zero else {})
    write_launch_files(with_files(phase, own, sizes), launch, launch)
    source: Checkpoint | State | None = None
    if job.start is not None:
        source = State(job.start) if "state" in job.start.name else Checkpoint(job.start)
    if source is not None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(source.tensor(name, MASTER))
    engine = build_engine(model, phase, launch, exact=source is None)
    counter, losses = StepCounter(0, 0, 20), []
    if source is not None:
        engine.load_masters(source.fill)
        counter.step = source.position.step
        if not preflight.lacks_moments(source.position, source.slots, phase):
            position = source.position
            engine.load_moments(source.fill, position.optimizer_step, position.param_groups)
    while counter.step < STEPS:
        inputs, targets = (part[rank::processes] for part in batch(counter.step))
        dtype = (
            next(model.parameters()).dtype if phase.derived.engine == "deepspeed" else torch.float32
        )
        with engine.micro_batch(last=True):
            loss = (engine.model(inputs.to(dtype)).float() - targets).square().mean()
            engine.backward(loss)
        engine.step(rate(counter.step))
        losses.append(loss.item())
        counter.step += 1
        if counter.step in (HALF, STEPS):
            Saving(engine, phase, NoLog(), folder / job.name).begin(counter, wait=True)
    if phase.derived.engine == "deepspeed":
        engine.model.destroy()  # type: ignore[operator]
    return losses


def _train_all(jobs: Sequence[Job], folder: Path) -> None:
    for job in jobs:
        train(job, folder, int(os.environ["RANK"]))


def run(jobs: Sequence[Job], folder: Path, server: Any) -> None:
    """Train jobs of one engine, one after the other, in as many processes as it has."""
    processes = jobs[0].phase.launch.num_processes
    output = folder / "output.txt"
    run_ranks(server.Process, _train_all, processes, list(jobs), folder, output=output)


def checkpoint(folder: Path, name: str, step: int = STEPS) -> Checkpoint:
    """A checkpoint that a job has written."""
    return Checkpoint(step_folder(folder / name, step))
