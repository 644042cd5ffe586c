"""The training loop. It knows no family and no engine beyond their interfaces."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from zerotrain import artifact
from zerotrain.checkpoint import KIND, write_position, write_rank
from zerotrain.errors import PipelineError
from zerotrain.families import Objective
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.position import EMA, MASTER, TrainingPosition
from zerotrain.training import ranks
from zerotrain.training.average import WeightAverage
from zerotrain.training.batches import Batches
from zerotrain.training.draws import step_seed
from zerotrain.training.engine import Engine
from zerotrain.training.log import Log
from zerotrain.training.loss_scale import exhausted
from zerotrain.training.optimizer import describe_group
from zerotrain.training.progress_folder import prune, step_folder
from zerotrain.training.schedule import learning_rate, momentum
from zerotrain.training.validation_history import Verdict

if TYPE_CHECKING:
    from zerotrain.training.validation import Validation


@dataclass
class Clock:
    """Where the training stands and what its schedule is."""

    step: int
    samples: int
    horizon: int
    """lr_scheduler_steps."""


def train(
    engine: Engine,
    objective: Objective,
    batches: Batches,
    phase: ResolvedPhase,
    clock: Clock,
    log: Log,
    progress: Path,
    stop_requested: Callable[[], bool],
    average: WeightAverage | None = None,
    validation: Validation | None = None,
) -> bool:
    """Train to phase.until_step, to where a validation ends it, or until a stop is requested.

    A checkpoint is saved in any case.

    Returns:
        Whether the phase is finished.

    Raises:
        PipelineError: the loss or a gradient is not a finite number; the newest checkpoint is from
            before.
    """
    verdict = validation.at(clock.step) if validation else Verdict()
    if verdict.save:  # a stop was asked for at this step, which left no time for its validation
        save(engine, phase, clock, log, progress, average, validation)
    while clock.step < phase.until_step and not verdict.ended:
        rate = learning_rate(phase, clock.step, clock.horizon)
        beta1 = momentum(phase, clock.step, clock.horizon)
        own_loss = _accumulate(engine, objective, batches, phase, clock)
        loss, stopping = ranks.settle(own_loss, stop_requested(), engine.device)
        _refuse_infinite("loss", loss, phase, clock)
        norm = _update(engine, rate, beta1, phase, clock)
        clock.step += 1
        clock.samples += phase.global_batch_size
        if average:
            average.update(clock.step)
        log.step(clock.step, clock.samples, loss, norm, rate, beta1)
        last = clock.step == phase.until_step
        if validation and (last or not stopping):
            verdict = validation.at(clock.step)
        asked = stopping or verdict.save or verdict.ended
        if asked or last or clock.step % phase.save_every == 0:
            save(engine, phase, clock, log, progress, average, validation)
        if stopping:
            break
    if validation and verdict.ended:
        validation.finish(clock.step)
    return clock.step >= phase.until_step or verdict.ended


def _update(
    engine: Engine, rate: float, beta1: float | None, phase: ResolvedPhase, clock: Clock
) -> float:
    """One optimizer step; the gradients' norm, infinite where fp16 left the update out."""
    scale = engine.loss_scale()
    norm = engine.step(rate, beta1)
    if scale is None or exhausted(scale, phase.fp16):
        _refuse_infinite("gradients' norm", norm, phase, clock)
    return norm


def _refuse_infinite(what: str, value: float, phase: ResolvedPhase, clock: Clock) -> None:
    if not math.isfinite(value):
        raise PipelineError(
            f"phase {phase.phase}: the {what} of step {clock.step + 1} is {value}",
            hint="lower learning_rate, or set max_grad_norm; "
            "training goes on from the newest checkpoint before it",
        )


def _accumulate(
    engine: Engine, objective: Objective, batches: Batches, phase: ResolvedPhase, clock: Clock
) -> float:
    """Gradients of this process's share of a global batch; its mean loss."""
    torch.manual_seed(step_seed(phase.seed, clock.step, engine.rank))
    micro, total = phase.micro_batch_size, 0.0
    for part in range(phase.gradient_accumulation_steps):
        first = clock.samples + (part * engine.world_size + engine.rank) * micro
        batch = batches.batch(first, micro, engine.device)
        with engine.micro_batch(last=part == phase.gradient_accumulation_steps - 1):
            loss = objective.loss(engine.model, batch).mean()
            engine.backward(loss)
        total += loss.item()
    return total / phase.gradient_accumulation_steps


def save(
    engine: Engine,
    phase: ResolvedPhase,
    clock: Clock,
    log: Log,
    progress: Path,
    average: WeightAverage | None = None,
    validation: Validation | None = None,
) -> None:
    """Write the rolling checkpoint of this step, complete at once, and remove the oldest.

    Every process writes its own part; the first one publishes them together.
    """
    rate = learning_rate(phase, clock.step, clock.horizon)
    beta1 = momentum(phase, clock.step, clock.horizon)
    position = TrainingPosition(
        run=phase.run,
        phase=phase.phase,
        step=clock.step,
        samples=clock.samples,
        optimizer=phase.optimizer,
        optimizer_step=engine.optimizer_step(),
        param_groups=[
            describe_group(phase, group, rate, beta1, scalars)
            for group, scalars in zip(engine.groups, engine.scalars(), strict=True)
        ],
        lr_scheduler=phase.lr_scheduler,
        lr_scheduler_steps=clock.horizon,
        rng={"scheme": "counter", "seed": phase.seed},
        engine=engine.describe(),
        loss_scale=engine.loss_scale(),
    )
    folder = step_folder(progress, clock.step)
    publishing = artifact.publish(folder, KIND) if engine.rank == 0 else nullcontext()
    with publishing as draft:
        shared = ranks.broadcast(draft.folder if draft else None)
        assert shared is not None
        spans = ranks.gather(write_rank(shared, engine.rank, (average or engine).fragments()))
        if draft:
            slots = [MASTER, *engine.slots(), *([EMA] if average else [])]
            write_position(draft.folder, position, engine.shapes, slots, spans)
            log.write_records(draft.folder / "records")
            if validation:
                validation.write_records(draft.folder / "records")
    if engine.rank == 0:
        prune(progress, phase.keep, clock.step)
