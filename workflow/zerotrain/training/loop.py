"""The training loop. It knows no family and no engine beyond their interfaces."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from zerotrain.errors import PipelineError
from zerotrain.families import Objective
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.training import ranks
from zerotrain.training.average import WeightAverage
from zerotrain.training.batches import Batches
from zerotrain.training.clock import Clock
from zerotrain.training.draws import step_seed
from zerotrain.training.engine import Engine
from zerotrain.training.generators import seed_generators
from zerotrain.training.log import Log
from zerotrain.training.loss_scale import exhausted
from zerotrain.training.saving import Saving
from zerotrain.training.schedule import learning_rate, momentum


def train(
    engine: Engine,
    objective: Objective,
    batches: Batches,
    phase: ResolvedPhase,
    clock: Clock,
    log: Log,
    saving: Saving,
    stop_requested: Callable[[], bool],
    average: WeightAverage | None = None,
) -> bool:
    """Train to phase.until_step or until a stop is requested; either way a checkpoint is saved.

    Returns:
        Whether the phase is finished.

    Raises:
        PipelineError: the loss or a gradient is not a finite number, the newest checkpoint being
            from before; or a checkpoint could not be written.
    """
    with saving:
        while clock.step < phase.until_step:
            rate = learning_rate(phase, clock.step, clock.horizon)
            beta1 = momentum(phase, clock.step, clock.horizon)
            own_loss = _accumulate(engine, objective, batches, phase, clock)
            flags = stop_requested(), saving.overdue(), saving.writing()
            loss, (stopping, overdue, writing) = ranks.settle(own_loss, flags, engine.device)
            saving.settle(writing)
            _refuse_infinite("loss", loss, phase, clock)
            norm = _update(engine, rate, beta1, phase, clock)
            clock.step += 1
            clock.samples += phase.global_batch_size
            if average:
                average.update(clock.step)
            log.step(clock.step, clock.samples, loss, norm, rate, beta1)
            last = stopping or clock.step == phase.until_step
            if last or overdue or saving.due(clock.step):
                saving.begin(clock, wait=last)
            if stopping:
                break
    return clock.step >= phase.until_step


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
    seed_generators(step_seed(phase.seed, clock.step, engine.rank), engine.device)
    micro, losses = phase.micro_batch_size, []
    first = clock.samples + engine.rank * micro
    for part in range(phase.gradient_accumulation_steps):
        batch = batches.batch(first, micro, engine.device)
        with engine.micro_batch(last=part == phase.gradient_accumulation_steps - 1):
            loss = objective.loss(engine.model, batch).mean()
            engine.backward(loss)
        losses.append(loss.detach())
        first += engine.world_size * micro
        batches.prepare(first, micro)  # a device still computes meanwhile
    total = 0.0
    for value in torch.stack(losses).tolist():
        total += value
    return total / phase.gradient_accumulation_steps
