"""The training loop. It knows no family and no engine beyond their interfaces."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from zerotrain import artifact
from zerotrain.checkpoint import KIND, write_position, write_rank
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
from zerotrain.training.not_finite import LeftOut, Losses, poisoned
from zerotrain.training.optimizer import describe_group
from zerotrain.training.progress_folder import prune, step_folder
from zerotrain.training.schedule import learning_rate, momentum
from zerotrain.training.unused import UnusedParameters


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
) -> bool:
    """Train to phase.until_step or until a stop is requested; either way a checkpoint is saved.

    Returns:
        Whether the phase is finished.

    Raises:
        PipelineError: the loss or a gradient is not a finite number, and such updates are not to
            be left out; the newest checkpoint is from before.
    """
    left_out = LeftOut(phase, batches, log)
    unused: UnusedParameters | None = UnusedParameters(engine)
    while clock.step < phase.until_step:
        rate = learning_rate(phase, clock.step, clock.horizon)
        beta1 = momentum(phase, clock.step, clock.horizon)
        own_loss, losses = _accumulate(engine, objective, batches, phase, clock)
        if unused:
            unused.settle(phase, log)
            unused = None
        loss, stopping = ranks.settle(own_loss, stop_requested(), engine.device)
        finite = math.isfinite(loss)
        if not finite:
            left_out.refuse_or_note("loss", loss, clock.step + 1, losses)
        scale = engine.loss_scale()
        norm = engine.step(rate, beta1)
        if finite and math.isfinite(norm):
            left_out.good()
        elif finite and (scale is None or exhausted(scale, phase.fp16)):
            left_out.refuse_or_note("gradients' norm", norm, clock.step + 1, losses)
        clock.step += 1
        clock.samples += phase.global_batch_size
        if average:
            average.update(clock.step)
        log.step(clock.step, clock.samples, loss, norm, rate, beta1)
        if stopping or clock.step % phase.save_every == 0 or clock.step == phase.until_step:
            save(engine, phase, clock, log, progress, average)
        if stopping:
            break
    return clock.step >= phase.until_step


def _accumulate(
    engine: Engine, objective: Objective, batches: Batches, phase: ResolvedPhase, clock: Clock
) -> tuple[float, Losses]:
    """Gradients of this process's share of a global batch; its mean loss, and every sample's."""
    torch.manual_seed(step_seed(phase.seed, clock.step, engine.rank))
    micro, total = phase.micro_batch_size, 0.0
    losses: Losses = []
    for part in range(phase.gradient_accumulation_steps):
        first = clock.samples + (part * engine.world_size + engine.rank) * micro
        batch = batches.batch(first, micro, engine.device)
        with engine.micro_batch(last=part == phase.gradient_accumulation_steps - 1):
            each = objective.loss(engine.model, batch)
            loss = each.mean()
            engine.backward(poisoned(loss))
        losses.append((first, each.detach()))
        total += loss.item()
    return total / phase.gradient_accumulation_steps, losses


def save(
    engine: Engine,
    phase: ResolvedPhase,
    clock: Clock,
    log: Log,
    progress: Path,
    average: WeightAverage | None = None,
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
    if engine.rank == 0:
        prune(progress, phase.keep, clock.step)
