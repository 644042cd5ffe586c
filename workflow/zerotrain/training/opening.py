"""A phase's engine, filled with what it goes on from: weights, moments, position, average."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from zerotrain.checkpoint import Checkpoint
from zerotrain.families import ImageFamily, TextFamily
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.position import EMA, MASTER
from zerotrain.state import ReadTensor, State
from zerotrain.trained import choose_trained, refuse_other_parameters, trained_parameters
from zerotrain.training import preflight
from zerotrain.training.average import WeightAverage
from zerotrain.training.clock import Clock
from zerotrain.training.engine import Engine, open_engine


@dataclass(frozen=True)
class Opened:
    """A phase that is ready to train."""

    model: torch.nn.Module
    """What the engine was opened with: its own parameters, trained and frozen ones."""
    engine: Engine
    clock: Clock
    average: WeightAverage | None
    records: Path | None
    """The log and the resources of the run so far."""


def open_phase(
    phase: ResolvedPhase,
    family: ImageFamily | TextFamily,
    launch: Path,
    base: Path,
    start: Path | None,
    resume: Path | None,
    swap: Path | None,
) -> Opened:
    """Build the engine and take over what training goes on from.

    Args:
        phase: The resolved phase.
        family: Its family.
        launch: Folder of the launch files.
        base: Folder of the base model.
        start: State of the phase before, if any.
        resume: Checkpoint of this phase, which counts before `start`.
        swap: Folder for what is swapped to a disk.

    Raises:
        PipelineError: what is taken over is of other parameters than the phase trains.
    """
    source: Checkpoint | State | None = None
    if resume is not None:
        source = Checkpoint(resume, verify=False)
    elif start is not None:
        source = State(start, verify=False)
    exact = source is None and not phase.zero3_init
    read: ReadTensor | None = None
    if phase.zero3_init:
        from zerotrain.training.partitioned_model import load_partitioned

        model, read = load_partitioned(
            family, base, phase, launch / "deepspeed.json", source, swap=swap
        )
    else:
        model = choose_trained(
            family.load_model(base),
            phase.adapter,
            phase.frozen_parameters,
            phase.seed,
            phase.trainable_parameters,
        )
        if source is not None:
            _take_weights(model, source)
    engine = open_engine(model, phase, launch, exact=exact, swap=swap)
    if source is None and read is not None:
        engine.load_masters(read)
    clock = Clock(0, 0, phase.lr_scheduler_steps)
    if source is not None:
        position = source.position
        engine.load_masters(source.tensor)
        if not preflight.lacks_moments(position, source.slots, phase):
            engine.load_moments(source.tensor, position.optimizer_step, position.param_groups)
        if position.loss_scale and phase.mixed_precision == "fp16":
            engine.load_loss_scale(position.loss_scale)
        clock = Clock(position.step, position.samples, _horizon(phase, position.lr_scheduler_steps))
    average = None
    if phase.use_ema:
        known = source is not None and EMA in source.slots
        average = WeightAverage(engine, phase, source.tensor if source and known else None)
    # Nothing here is kept that has the source's files open: they would keep their disk space when
    # the checkpoint is pruned.
    records = source.artifact.folder / "records" if source is not None else None
    return Opened(model, engine, clock, average, records)


def _take_weights(model: torch.nn.Module, source: Checkpoint | State) -> None:
    """Fill the model's trained parameters before an engine is built around it."""
    parameters = trained_parameters(model)
    refuse_other_parameters(
        source.shapes, {n: list(p.shape) for n, p in parameters.items()}, source.artifact.folder
    )
    with torch.no_grad():
        for name in source.names:
            parameters[name].copy_(source.tensor(name, MASTER))


def _horizon(phase: ResolvedPhase, kept: int) -> int:
    """The schedule's horizon: the user's word, else the one that training began with."""
    own = phase.lr_scheduler_steps
    # A state of elsewhere names no horizon.
    return own if phase.sources["lr_scheduler_steps"][0] == "user" or kept == 0 else kept
