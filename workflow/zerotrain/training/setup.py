"""Build a phase's engine and load what it continues from: weights, moments, position, EMA."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.machine.device import process_device
from zerotrain.models.families import Family
from zerotrain.models.quantized_linear import quantize_linear_layers
from zerotrain.models.trainable import check_same_parameters, choose_trained, trained_parameters
from zerotrain.state.checkpoint import Checkpoint
from zerotrain.state.position import EMA_SLOT, MASTER, StepCounter
from zerotrain.state.state import FillPart, State
from zerotrain.training.checkpointing import preflight
from zerotrain.training.engines.ema import EMA
from zerotrain.training.engines.engine import Engine
from zerotrain.training.engines.gradient_checkpointing import enable_gradient_checkpointing
from zerotrain.training.engines.kernels import compile_model


@dataclass(frozen=True)
class TrainingSetup:
    """A phase that is ready to train."""

    model: torch.nn.Module
    """The model that the engine was built from, with its trained and frozen parameters."""
    engine: Engine
    counter: StepCounter
    ema: EMA | None
    records: Path | None
    """Folder with the log and the resources of the run so far."""


def set_up_phase(
    phase: ResolvedPhase,
    family: Family,
    launch: Path,
    base: Path,
    start: Path | None,
    resume: Path | None,
    swap: Path | None,
) -> TrainingSetup:
    """Build the engine and load what training continues from.

    Args:
        phase: The resolved phase.
        family: Its family.
        launch: Folder of the launch files.
        base: Folder of the base model.
        start: State of the phase before, if any.
        resume: Checkpoint of this phase, which takes precedence over `start`.
        swap: Folder for what is swapped to a disk.

    Raises:
        PipelineError: the source has other parameters than the phase trains.
    """
    source: Checkpoint | State | None = None
    if resume is not None:
        source = Checkpoint(resume, verify=False)
    elif start is not None:
        source = State(start, verify=False)
    exact = source is None and not phase.launch.zero3_init
    base_weights: FillPart | None = None
    if phase.launch.zero3_init:
        from zerotrain.training.engines.partitioned_model import load_partitioned

        model, base_weights = load_partitioned(
            family, base, phase, launch / "deepspeed.json", source, swap=swap
        )
    else:
        model = family.load_model(base)
        if phase.base_model_precision != "no_change":
            quantize_linear_layers(
                model,
                phase.base_model_precision,
                phase.base_model_exclude_modules,
                process_device(),
            )
        model = choose_trained(
            model,
            phase.adapter,
            phase.frozen_parameters,
            phase.seed,
            phase.trainable_parameters,
        )
        if source is not None:
            check_same_parameters(
                source.shapes,
                {name: list(p.shape) for name, p in trained_parameters(model).items()},
                source.artifact.folder,
            )
            if phase.swaps:  # the engine cannot write loaded weights to the disk
                _take_weights(model, source)
    if phase.train.tread_config is not None:
        from zerotrain.models.families.token_routing import route_tokens

        route_tokens(model, [dict(route) for route in phase.train.tread_config.routes])
    engine = build_engine(model, phase, launch, exact=exact, swap=swap)
    if source is None and base_weights is not None:
        engine.load_masters(base_weights)
    counter = StepCounter(0, 0, phase.derived.lr_scheduler_steps)
    if source is not None:
        position = source.position
        engine.load_masters(source.fill)
        if not preflight.lacks_moments(position, source.slots, phase):
            engine.load_moments(source.fill, position.optimizer_step, position.param_groups)
        if position.loss_scale and phase.launch.mixed_precision == "fp16":
            engine.load_loss_scale(position.loss_scale)
        counter = StepCounter(
            position.step, position.samples, _horizon(phase, position.lr_scheduler_steps)
        )
    ema = None
    if phase.train.use_ema:
        known = source is not None and EMA_SLOT in source.slots
        ema = EMA(engine, phase, source.fill if source and known else None)
    # Keep nothing that holds the source's files open: they would occupy disk space after the
    # checkpoint is pruned.
    records = source.artifact.folder / "records" if source is not None else None
    return TrainingSetup(model, engine, counter, ema, records)


def _take_weights(model: torch.nn.Module, source: Checkpoint | State) -> None:
    """Load the model's trained parameters before an engine is built around it."""
    parameters = trained_parameters(model)
    with torch.no_grad():
        for name in source.names:
            parameters[name].copy_(source.tensor(name, MASTER))


def _horizon(phase: ResolvedPhase, kept: int) -> int:
    """Return the schedule's horizon: the user's, else the one that training started with."""
    own = phase.derived.lr_scheduler_steps
    # An external state has no horizon.
    return own if phase.sources["lr_scheduler_steps"][0] == "user" or kept == 0 else kept


def build_engine(
    model: torch.nn.Module,
    phase: ResolvedPhase,
    launch: Path,
    *,
    exact: bool,
    swap: Path | None = None,
) -> Engine:
    """Build the engine that the phase's launch names.

    Args:
        model: The model with its starting weights, float32 on the CPU unless they are quantized or
            partitioned; frozen parameters require no gradient.
        phase: The resolved phase.
        launch: Folder of the launch files.
        exact: Whether the master weights must come from the model; else load_masters follows, and
            no second copy of the weights is held until then.
        swap: Folder for what is swapped to a disk, instead of the one that the files name.
    """
    model.train()
    engine: Engine
    if phase.derived.engine == "deepspeed":
        from zerotrain.training.engines.zero_engine import ZeroEngine

        engine = ZeroEngine(model, phase, launch / "deepspeed.json", exact=exact, swap=swap)
    else:
        from zerotrain.training.engines.torch_engine import TorchEngine

        engine = TorchEngine(model, phase)
    enable_gradient_checkpointing(model, phase)
    compile_model(model, phase)
    return engine
