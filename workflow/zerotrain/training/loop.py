"""The training loop. It knows no family and no engine beyond their interfaces."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from zerotrain.families import Objective
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.machine.memory_watch import MemoryWatch
from zerotrain.training import ranks
from zerotrain.training.average import WeightAverage
from zerotrain.training.batches import Batches
from zerotrain.training.clock import Clock
from zerotrain.training.draws import step_seed
from zerotrain.training.engine import Engine
from zerotrain.training.generators import seed_generators
from zerotrain.training.log import Log
from zerotrain.training.loss_scale import exhausted
from zerotrain.training.not_finite import LeftOut, Losses, poisoned
from zerotrain.training.saving import Saving
from zerotrain.training.schedule import learning_rate, momentum
from zerotrain.training.unused import UnusedParameters
from zerotrain.training.validation_history import Verdict

if TYPE_CHECKING:
    from zerotrain.training.validation import Validation


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
    validation: Validation | None = None,
) -> bool:
    """Train to phase.until_step, to where a validation ends it, or until a stop is requested.

    A checkpoint is saved in any case.

    Returns:
        Whether the phase is finished.

    Raises:
        PipelineError: the loss or a gradient is not a finite number, and such updates are not to
            be left out, the newest checkpoint being from before; or a checkpoint could not be
            written.
    """
    left_out = LeftOut(phase, batches, log)
    memory = MemoryWatch()
    unused: UnusedParameters | None = UnusedParameters(engine)
    log.lap("other")
    verdict = validation.at(clock.step) if validation else Verdict()
    log.lap("validation")
    with saving:
        if verdict.save:  # a stop was asked for at this step, which left no time for its validation
            saving.begin(clock, wait=True)
        while clock.step < phase.until_step and not verdict.ended:
            log.lap("other")
            rate = learning_rate(phase, clock.step, clock.horizon)
            beta1 = momentum(phase, clock.step, clock.horizon)
            own_loss, losses = _accumulate(engine, objective, batches, phase, clock, log)
            if unused:
                if unused.settle(phase, log):
                    own_loss, losses = _accumulate(engine, objective, batches, phase, clock, log)
                unused = None
            flags = stop_requested(), saving.overdue(), saving.writing()
            loss, (stopping, overdue, writing) = ranks.settle(own_loss, flags, engine.device)
            log.lap("backward")
            saving.settle(writing)
            log.lap("save")
            if not math.isfinite(loss):
                saving.finish()  # what is under way is from before
                left_out.refuse_or_note("loss", loss, clock.step + 1, losses)
            scale = engine.loss_scale()
            norm = engine.step(rate, beta1)
            if math.isfinite(loss) and math.isfinite(norm):
                left_out.good()
            elif math.isfinite(loss) and (scale is None or exhausted(scale, phase.fp16)):
                saving.finish()
                left_out.refuse_or_note("gradients' norm", norm, clock.step + 1, losses)
            clock.step += 1
            clock.samples += phase.global_batch_size
            if average:
                average.update(clock.step)
            log.lap("optimizer")
            log.step(clock.step, clock.samples, loss, norm, rate, beta1)
            last = clock.step == phase.until_step
            if validation and (last or not stopping):
                log.lap("other")
                verdict = validation.at(clock.step)
                log.lap("validation")
            ending = stopping or last or verdict.ended
            if ending or verdict.save or overdue or saving.due(clock.step):
                log.memory(ranks.gather(memory.use()), memory.peaks())
                saving.begin(clock, wait=ending)
                log.lap("save")
            if stopping:
                break
        if validation and verdict.ended:
            validation.finish(clock.step)
    return clock.step >= phase.until_step or verdict.ended


def _accumulate(
    engine: Engine,
    objective: Objective,
    batches: Batches,
    phase: ResolvedPhase,
    clock: Clock,
    log: Log,
) -> tuple[float, Losses]:
    """Gradients of this process's share of a global batch; its mean loss, and every sample's."""
    seed_generators(step_seed(phase.seed, clock.step, engine.rank), engine.device)
    micro, means = phase.micro_batch_size, []
    losses: Losses = []
    first = clock.samples + engine.rank * micro
    for part in range(phase.gradient_accumulation_steps):
        batch = batches.batch(first, micro, engine.device)
        log.lap("data")
        with engine.micro_batch(last=part == phase.gradient_accumulation_steps - 1):
            each = objective.loss(engine.model, batch)
            loss = each.mean()
            log.lap("forward")
            engine.backward(poisoned(loss))
        losses.append((first, each.detach()))
        means.append(loss.detach())
        first += engine.world_size * micro
        log.lap("backward")
        batches.prepare(first, micro)  # a device still computes meanwhile
        log.lap("data")
    total = 0.0
    for value in torch.stack(means).tolist():
        total += value
    return total / phase.gradient_accumulation_steps, losses
