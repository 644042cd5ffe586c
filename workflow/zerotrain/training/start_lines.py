"""What a training says before its first step: what will happen, and what it will take."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import torch

from zerotrain import optimizers
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.machine.host import gib
from zerotrain.position import EMA, MASTER
from zerotrain.tracker_names import TENSORBOARD, chosen
from zerotrain.training import progress_folder
from zerotrain.training.checkpoint_room import checkpoint_bytes, most_to_come
from zerotrain.training.engine import Engine


def start_lines(
    model: torch.nn.Module, engine: Engine, phase: ResolvedPhase, step: int, progress: Path
) -> list[str]:
    """Sentences for the person who starts a training.

    Args:
        model: What the engine was opened with: its own parameters, trained and frozen ones.
        engine: The engine.
        phase: The resolved phase.
        step: Steps that have been made.
        progress: The phase's progress.
    """
    return [
        f"{phase.preset} on {_devices(engine)}, steps {step} to {phase.until_step}, "
        f"global batch {phase.global_batch_size}{_batch(phase)}",
        _parameters(model, engine),
        _samples(phase, step),
        _disk(engine, phase, step, progress),
        *_memory(phase),
        _curves(phase, progress),
    ]


def _devices(engine: Engine) -> str:
    return str(engine.device) if engine.world_size == 1 else f"{engine.world_size} processes"


def _batch(phase: ResolvedPhase) -> str:
    parts = [str(phase.micro_batch_size)]
    if phase.gradient_accumulation_steps > 1:
        parts.append(f"{phase.gradient_accumulation_steps} accumulated")
    if phase.num_processes > 1:
        parts.append(f"{phase.num_processes} processes")
    return f" ({' x '.join(parts)})" if len(parts) > 1 else ""


def _parameters(model: torch.nn.Module, engine: Engine) -> str:
    trained = sum(map(math.prod, engine.shapes.values()))
    # A parameter that ZeRO has partitioned is empty, and remembers its size.
    whole = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
    if trained == whole:
        return f"trains all {counted(trained)} parameters"
    return f"trains {counted(trained)} of {counted(whole)} parameters ({trained / whole:.2%})"


def _samples(phase: ResolvedPhase, step: int) -> str:
    rows = (phase.until_step - step) * phase.global_batch_size
    epochs = rows / phase.epoch_size
    return f"{rows:,} samples: {epochs:.3g} epochs of {phase.epoch_size:,}"


def _disk(engine: Engine, phase: ResolvedPhase, step: int, progress: Path) -> str:
    slots = [MASTER, *optimizers.slots(phase.optimizer, phase.optimizer_args)]
    slots += [EMA] if phase.use_ema else []
    one = checkpoint_bytes(engine.shapes, slots, phase.optimizer)
    there = [saved for saved in progress_folder.saved_steps(progress) if saved <= step]
    most = most_to_come(phase, step, there) * one
    free = shutil.disk_usage(progress).free
    of = " of the" if most <= free else ", more than the"
    end = "" if most <= free else ": the oldest are removed before their time"
    steps = " steps" if isinstance(phase.save_every, int) else ""
    return (
        f"saves {gib(one)} every {phase.save_every}{steps} and keeps {phase.keep}: up to "
        f"{gib(most)}{of} {gib(free)} that are free in {progress}{end}"
    )


def _memory(phase: ResolvedPhase) -> list[str]:
    """What `auto` has planned, which only it knows."""
    source, why = phase.sources.get("preset", ("default", ""))
    return [f"memory: {why}"] if source == "derived" and why else []


def _curves(phase: ResolvedPhase, progress: Path) -> str:
    names = chosen(phase.report_to)
    told = [str(progress / progress_folder.LOG)]
    if TENSORBOARD in names:
        told.append(f"`tensorboard --logdir {progress / TENSORBOARD}`")
    others = [name for name in names if name != TENSORBOARD]
    return f"curves: {', '.join([*told, *others])}; time left: after the first steps"


def counted(count: int) -> str:
    """Parameters as people read them: 2.57 B, 23.2 M."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g} {letter}"
    return str(count)
