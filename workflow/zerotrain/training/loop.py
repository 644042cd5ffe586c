"""The training loop. It knows no family and no engine beyond their interfaces."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from zerotrain import artifact
from zerotrain.checkpoint import KIND, write_position, write_rank
from zerotrain.errors import PipelineError
from zerotrain.families import Objective
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.state import ADAM_SLOTS, MASTER, TrainingPosition
from zerotrain.training.batches import Batches
from zerotrain.training.draws import step_seed
from zerotrain.training.engine import Engine
from zerotrain.training.log import TrainingLog
from zerotrain.training.progress_folder import prune, step_folder
from zerotrain.training.schedule import learning_rate


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
    log: TrainingLog,
    progress: Path,
    stop_requested: Callable[[], bool],
) -> bool:
    """Train to phase.until_step or until a stop is requested; either way a checkpoint is saved.

    Returns:
        Whether the phase is finished.

    Raises:
        PipelineError: the loss or a gradient is not a finite number; the newest checkpoint is from
            before.
    """
    while clock.step < phase.until_step:
        rate = learning_rate(phase, clock.step, clock.horizon)
        loss = _accumulate(engine, objective, batches, phase, clock)
        _refuse_infinite("loss", loss, phase, clock)
        norm = engine.step(rate)
        _refuse_infinite("gradients' norm", norm, phase, clock)
        clock.step += 1
        clock.samples += phase.global_batch_size
        log.step(clock.step, clock.samples, loss, norm, rate)
        stopping = stop_requested()
        if stopping or clock.step % phase.save_every == 0 or clock.step == phase.until_step:
            save(engine, phase, clock, log, progress)
        if stopping:
            break
    return clock.step >= phase.until_step


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
    """Gradients of one global batch; its mean loss."""
    torch.manual_seed(step_seed(phase.seed, clock.step, engine.rank))
    micro, total = phase.micro_batch_size, 0.0
    for part in range(phase.gradient_accumulation_steps):
        batch = batches.batch(clock.samples + part * micro, micro, engine.device)
        loss = objective.loss(engine.model, batch, snr_gamma=phase.snr_gamma).mean()
        engine.backward(loss)
        total += loss.item()
    return total / phase.gradient_accumulation_steps


def save(
    engine: Engine, phase: ResolvedPhase, clock: Clock, log: TrainingLog, progress: Path
) -> None:
    """Write the rolling checkpoint of this step, complete at once, and remove the oldest."""
    shapes = {n: list(p.shape) for n, p in engine.named_trained()}
    position = TrainingPosition(
        run=phase.run,
        phase=phase.phase,
        step=clock.step,
        samples=clock.samples,
        optimizer=phase.optimizer,
        optimizer_step=engine.optimizer_step(),
        param_groups=[
            {
                "parameters": list(shapes),
                "lr": learning_rate(phase, clock.step, clock.horizon),
                "betas": [phase.adam_beta1, phase.adam_beta2],
                "eps": phase.adam_epsilon,
                "weight_decay": phase.adam_weight_decay,
            }
        ],
        lr_scheduler=phase.lr_scheduler,
        lr_scheduler_steps=clock.horizon,
        rng={"scheme": "counter", "seed": phase.seed},
        engine=engine.describe(),
    )
    with artifact.publish(step_folder(progress, clock.step), KIND) as draft:
        spans = write_rank(draft.folder, engine.rank, engine.fragments())
        write_position(draft.folder, position, shapes, [MASTER, *ADAM_SLOTS], [spans])
        log.write_records(draft.folder / "records")
    prune(progress, phase.keep, clock.step)
