"""The training loop. It uses families and engines only through their interfaces."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from zerotrain.data.draws import step_seed
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.launch.schedule import learning_rate, momentum
from zerotrain.machine.memory_watch import MemoryWatch
from zerotrain.models.families import Objective
from zerotrain.training import ranks
from zerotrain.training.checkpointing.saving import Saving
from zerotrain.training.clock import Clock
from zerotrain.training.engines.average import WeightAverage
from zerotrain.training.engines.buffers import Buffers
from zerotrain.training.engines.engine import Engine
from zerotrain.training.engines.loss_scale import exhausted
from zerotrain.training.generators import seed_generators
from zerotrain.training.not_finite import LeftOut, Losses, poisoned
from zerotrain.training.read_ahead import ReadAhead
from zerotrain.training.reporting.log import Log
from zerotrain.training.reporting.unused import UnusedParameters
from zerotrain.training.reporting.validation_history import Verdict

if TYPE_CHECKING:
    from zerotrain.training.reporting.validation import Validation


def train(
    engine: Engine,
    objective: Objective,
    batches: ReadAhead,
    phase: ResolvedPhase,
    clock: Clock,
    log: Log,
    saving: Saving,
    stop_requested: Callable[[], bool],
    average: WeightAverage | None = None,
    validation: Validation | None = None,
) -> bool:
    """Train until the phase ends, a validation ends it, or a stop is requested.

    In each case the last step is saved.

    Returns:
        Whether the phase is finished.

    Raises:
        PipelineError: the loss or the gradients' norm is not finite, and the update may not be
            skipped (the newest checkpoint precedes it); training changes buffers of the model; or
            a checkpoint cannot be written.
    """
    left_out = LeftOut(phase, batches, log)
    memory = MemoryWatch()
    unused: UnusedParameters | None = UnusedParameters(engine)
    buffers = Buffers(engine.model)
    log.lap("other")
    verdict = validation.at(clock.step) if validation else Verdict()
    log.lap("validation")
    with saving:
        if verdict.save:  # a stop was requested at this step before its validation
            saving.begin(clock, wait=True)
        while clock.step < phase.derived.until_step and not verdict.ended:
            log.lap("other")
            rate = learning_rate(phase.train, clock.step, clock.horizon)
            beta1 = momentum(phase.train, clock.step, clock.horizon)
            own_loss, losses = _accumulate(engine, objective, batches, phase, clock, log)
            if unused:
                if unused.settle(phase, log):
                    own_loss, losses = _accumulate(engine, objective, batches, phase, clock, log)
                unused = None
                buffers.refuse_changed(phase)
            flags = stop_requested(), saving.overdue(), saving.writing()
            loss, (stopping, overdue, writing) = ranks.settle(own_loss, flags, engine.device)
            log.lap("backward")
            saving.settle(writing)
            log.lap("save")
            if not math.isfinite(loss):
                saving.finish()  # the checkpoint being written precedes this step
                left_out.refuse_or_note("loss", loss, clock.step + 1, losses)
            scale = engine.loss_scale()
            norm = engine.step(rate, beta1)
            if math.isfinite(loss) and math.isfinite(norm):
                left_out.good()
            elif math.isfinite(loss) and (scale is None or exhausted(scale, phase.launch.fp16)):
                saving.finish()
                left_out.refuse_or_note("gradients' norm", norm, clock.step + 1, losses)
            clock.step += 1
            clock.samples += phase.train.global_batch_size
            if average:
                average.update(clock.step)
            log.lap("optimizer")
            log.step(clock.step, clock.samples, loss, norm, rate, beta1)
            last = clock.step == phase.derived.until_step
            if validation and (last or not stopping):
                log.lap("other")
                verdict = validation.at(clock.step)
                log.lap("validation")
            ending = stopping or last or verdict.ended
            if ending or verdict.save or overdue or saving.due(clock.step):
                buffers.refuse_changed(phase)
                log.memory(ranks.gather(memory.use()), memory.peaks())
                saving.begin(clock, wait=ending)
                log.lap("save")
            if stopping:
                break
        if validation and verdict.ended:
            validation.finish(clock.step)
    return clock.step >= phase.derived.until_step or verdict.ended


def _accumulate(
    engine: Engine,
    objective: Objective,
    batches: ReadAhead,
    phase: ResolvedPhase,
    clock: Clock,
    log: Log,
) -> tuple[float, Losses]:
    """Compute the gradients of this process's share of a global batch.

    Returns:
        The mean loss of the share, and the losses of its samples.
    """
    seed_generators(step_seed(phase.seed, clock.step, engine.rank), engine.device)
    micro, means = phase.derived.micro_batch_size, []
    losses: Losses = []
    first = clock.samples + engine.rank * micro
    for part in range(phase.train.gradient_accumulation_steps):
        batch = batches.batch(first, micro, engine.device)
        log.lap("data")
        with engine.micro_batch(last=part == phase.train.gradient_accumulation_steps - 1):
            each = objective.loss(engine.model, batch)
            loss = each.mean()
            log.lap("forward")
            engine.backward(poisoned(loss))
        losses.append((first, each.detach()))
        means.append(loss.detach())
        first += engine.world_size * micro
        log.lap("backward")
    total = 0.0
    for value in torch.stack(means).tolist():
        total += value
    return total / phase.train.gradient_accumulation_steps, losses
