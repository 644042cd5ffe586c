"""The training loop. It uses families and engines only through their interfaces."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from zerotrain.data.draws import step_seed
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.launch.schedules import learning_rate, momentum
from zerotrain.machine.memory_watch import MemoryWatch, memory_now
from zerotrain.models.families import Objective
from zerotrain.state.position import StepCounter
from zerotrain.training import ranks
from zerotrain.training.batches import ReadAhead
from zerotrain.training.checkpointing.saving import Saving
from zerotrain.training.checks import (
    Buffers,
    Losses,
    SkippedSteps,
    UnusedParameters,
    nan_gradients_if_not_finite,
)
from zerotrain.training.engines.ema import EMA
from zerotrain.training.engines.engine import Engine, is_at_minimum
from zerotrain.training.reporting.log import Log, has_line
from zerotrain.training.reporting.validation_history import Verdict

if TYPE_CHECKING:
    from zerotrain.training.reporting.validation import Validation


def train(
    engine: Engine,
    objective: Objective,
    batches: ReadAhead,
    phase: ResolvedPhase,
    counter: StepCounter,
    log: Log,
    saving: Saving,
    stop_requested: Callable[[], bool],
    ema: EMA | None = None,
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
    skipped = SkippedSteps(phase, batches, log)
    memory = MemoryWatch()
    unused: UnusedParameters | None = UnusedParameters(engine)
    buffers = Buffers(engine.model)
    log.lap("other")
    verdict = validation.at(counter.step) if validation else Verdict()
    log.lap("validation")
    with saving:
        if verdict.save:  # a stop was requested at this step before its validation
            saving.begin(counter, wait=True)
        while counter.step < phase.derived.until_step and not verdict.ended:
            log.lap("other")
            rate = learning_rate(phase.train, counter.step, counter.horizon)
            beta1 = momentum(phase.train, counter.step, counter.horizon)
            own_loss, losses = _accumulate(engine, objective, batches, phase, counter, log)
            if unused:
                if unused.report(phase, log):
                    own_loss, losses = _accumulate(engine, objective, batches, phase, counter, log)
                unused = None
                buffers.check_unchanged(phase)
            flags = stop_requested(), saving.is_overdue(), saving.is_writing()
            loss, (stopping, overdue, writing) = ranks.reduce_loss_and_flags(
                own_loss, flags, engine.device
            )
            log.lap("backward")
            saving.wait_or_stage_tensors(writing)
            log.lap("save")
            if not math.isfinite(loss):
                saving.finish()  # the checkpoint being written precedes this step
                skipped.check_and_report("loss", loss, counter.step + 1, losses)
            scale = engine.loss_scale()
            norm = engine.step(rate, beta1)
            if math.isfinite(loss) and math.isfinite(norm):
                skipped.reset()
            elif math.isfinite(loss) and (scale is None or is_at_minimum(scale, phase.launch.fp16)):
                saving.finish()
                skipped.check_and_report("gradients' norm", norm, counter.step + 1, losses)
            counter.step += 1
            counter.samples += phase.train.global_batch_size
            if ema:
                ema.update(counter.step)
            log.lap("optimizer")
            in_use = ranks.gather(memory_now()) if has_line(phase, counter.step) else []
            log.step(counter.step, counter.samples, loss, norm, rate, in_use, beta1)
            last = counter.step == phase.derived.until_step
            if validation and (last or not stopping):
                log.lap("other")
                verdict = validation.at(counter.step)
                log.lap("validation")
            ending = stopping or last or verdict.ended
            if ending or verdict.save or overdue or saving.is_due(counter.step):
                buffers.check_unchanged(phase)
                log.memory(ranks.gather(memory.use()), memory.peaks())
                saving.begin(counter, wait=ending)
                log.lap("save")
            if stopping:
                break
        if validation and verdict.ended:
            validation.finish(counter.step)
    return counter.step >= phase.derived.until_step or verdict.ended


def _accumulate(
    engine: Engine,
    objective: Objective,
    batches: ReadAhead,
    phase: ResolvedPhase,
    counter: StepCounter,
    log: Log,
) -> tuple[float, Losses]:
    """Compute the gradients of this process's share of a global batch.

    Returns:
        The mean loss of the share, and the losses of its samples.
    """
    seed_generators(step_seed(phase.seed, counter.step, engine.rank), engine.device)
    micro, means = phase.derived.micro_batch_size, []
    losses: Losses = []
    first = counter.samples + engine.rank * micro
    for part in range(phase.train.gradient_accumulation_steps):
        batch = batches.batch(first, micro, engine.device)
        log.lap("data")
        with engine.micro_batch(last=part == phase.train.gradient_accumulation_steps - 1):
            each = objective.loss(engine.model, batch)
            if (weight := batch.get("loss_weight")) is not None:
                each = each * weight
            loss = each.mean()
            log.lap("forward")
            engine.backward(nan_gradients_if_not_finite(loss))
        losses.append((first, each.detach()))
        means.append(loss.detach())
        first += engine.world_size * micro
        log.lap("backward")
    total = 0.0
    for value in torch.stack(means).tolist():
        total += value
    return total / phase.train.gradient_accumulation_steps, losses


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the host's generator and the device's as torch.manual_seed would.

    torch.manual_seed also stores, with a stack trace per call, the seed of every device that the
    process has not initialized.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)
