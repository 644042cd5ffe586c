"""Messages of a training before its first step: its plan and its resource needs."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import NamedTuple

import torch

from zerotrain.config.trackers import TENSORBOARD, chosen_trackers
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.machine.host import gib
from zerotrain.models.quantized_linear import quantized_layers
from zerotrain.training.checkpointing import progress_folder
from zerotrain.training.checkpointing.checkpoint_room import checkpoint_bytes, max_new_checkpoints
from zerotrain.training.checkpointing.preflight import state_slots
from zerotrain.training.engines.engine import Engine


def start_lines(
    model: torch.nn.Module, engine: Engine, phase: ResolvedPhase, step: int, progress: Path
) -> list[str]:
    """Return the messages for the user who starts a training; see also `start_details`.

    Args:
        model: The model that the engine was opened with: all its parameters, trained and frozen.
        engine: The engine.
        phase: The resolved phase.
        step: Steps completed so far.
        progress: The phase's progress folder.
    """
    return [
        f"{phase.launch.preset} on {_devices(engine)}, steps {step} to {phase.derived.until_step}, "
        f"global batch {phase.train.global_batch_size}{_batch(phase)}",
        f"{_parameters(model, engine)} on {_samples(phase, step)}",
        *_memory(phase),
        *([] if (disk := _disk(engine, phase, step, progress)).fits else [disk.line]),
    ]


def start_details(engine: Engine, phase: ResolvedPhase, step: int, progress: Path) -> list[str]:
    """Return further messages for the log: space for checkpoints, and location of the curves."""
    disk = _disk(engine, phase, step, progress)
    return [*([disk.line] if disk.fits else []), _curves(phase, progress)]


class _Disk(NamedTuple):
    line: str
    fits: bool


def _devices(engine: Engine) -> str:
    return str(engine.device) if engine.world_size == 1 else f"{engine.world_size} processes"


def _batch(phase: ResolvedPhase) -> str:
    parts = [str(phase.derived.micro_batch_size)]
    if phase.train.gradient_accumulation_steps > 1:
        parts.append(f"{phase.train.gradient_accumulation_steps} accumulated")
    if phase.launch.num_processes > 1:
        parts.append(f"{phase.launch.num_processes} processes")
    return f" ({' x '.join(parts)})" if len(parts) > 1 else ""


def _parameters(model: torch.nn.Module, engine: Engine) -> str:
    trained = sum(map(math.prod, engine.shapes.values()))
    # A parameter partitioned by ZeRO is empty, and ds_numel is its full size.
    whole = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
    packed = quantized_layers(model)
    whole += sum(layer.numel for layer in packed)
    if trained == whole:
        return f"trains all {format_count(trained)} parameters"
    share = f"{trained / whole:.2%}"
    line = f"trains {format_count(trained)} of {format_count(whole)} parameters ({share})"
    if packed:
        size = gib(sum(layer.nbytes for layer in packed))
        line += f", {len(packed)} frozen layers in {packed[0].precision} ({size})"
    return line


def _samples(phase: ResolvedPhase, step: int) -> str:
    rows = (phase.derived.until_step - step) * phase.train.global_batch_size
    epochs = rows / phase.derived.epoch_size
    return f"{rows:,} samples: {epochs:.3g} epochs of {phase.derived.epoch_size:,}"


def _disk(engine: Engine, phase: ResolvedPhase, step: int, progress: Path) -> _Disk:
    one = checkpoint_bytes(engine.shapes, state_slots(phase), phase.train.optimizer)
    there = [saved for saved in progress_folder.saved_steps(progress) if saved <= step]
    most = max_new_checkpoints(phase, step, there) * one
    free = shutil.disk_usage(progress).free
    of = " of the" if most <= free else ", more than the"
    end = "" if most <= free else ": the oldest are removed before their time"
    steps = " steps" if isinstance(phase.train.save_every, int) else ""
    line = (
        f"saves {gib(one)} every {phase.train.save_every}{steps} and keeps {phase.train.keep}: "
        f"up to {gib(most)}{of} {gib(free)} that are free in {progress}{end}"
    )
    return _Disk(line, most <= free)


def _memory(phase: ResolvedPhase) -> list[str]:
    """Return the memory plan, which only launch `auto` has."""
    source, why = phase.sources.get("preset", ("default", ""))
    return [f"memory: {why}"] if source == "derived" and why else []


def _curves(phase: ResolvedPhase, progress: Path) -> str:
    names = chosen_trackers(phase.train.report_to)
    places = [str(progress / progress_folder.LOG)]
    if TENSORBOARD in names:
        places.append(f"`tensorboard --logdir {progress / TENSORBOARD}`")
    others = [name for name in names if name != TENSORBOARD]
    return f"curves: {', '.join([*places, *others])}; time left: after the first steps"


def format_count(count: int) -> str:
    """Return a parameter count in readable form: 2.57 B, 23.2 M."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g} {letter}"
    return str(count)
