"""Where a training stands, apart from its tensors: the JSON of a checkpoint and of a state."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from zerotrain.artifact import Artifact
from zerotrain.errors import PipelineError

MASTER, EMA = "master", "ema"
"""Slots of every engine: the float32 weights, and their average where a training keeps one."""
ADAM_SLOTS = ("exp_avg", "exp_avg_sq")
"""Adam's own names of its moments."""


@dataclass(frozen=True, kw_only=True)
class TrainingPosition:
    """Step, samples, optimizer, schedule, randomness and what made them."""

    run: str
    phase: str
    step: int
    """Global optimizer steps done."""
    samples: int
    """Samples drawn since the start of the run: the position of the sampler."""
    optimizer: str
    optimizer_step: int
    """Updates that the optimizer has made, from which Adam's bias correction follows."""
    param_groups: list[dict[str, Any]]
    """Parameter names, learning rate, weight_decay and the optimizer's values of each group; under
    `scalars` the numbers that it keeps beside its tensors and its count, such as NAdam's."""
    lr_scheduler: str
    lr_scheduler_steps: int
    rng: dict[str, Any]
    """Every draw is a function of (seed, epoch, sample) or (seed, step, rank): the seed is all."""
    engine: dict[str, Any]
    """What made it: preset, engine, zero_stage, offload_optimizer, offload_param, world_size,
    mixed_precision, global_batch_size, gradient_accumulation_steps."""
    loss_scale: dict[str, Any] | None = None
    """fp16 only: {"scale": 65536.0, "good_steps": 12, "hysteresis": 1}, the good steps since it was
    last changed, and the overflows until it is halved."""


HINT = "no version of this program writes that: do not use it if you do not know who made it"
TYPES: dict[str, type] = {
    **dict.fromkeys(("run", "phase", "optimizer", "lr_scheduler"), str),
    **dict.fromkeys(("step", "samples", "optimizer_step", "lr_scheduler_steps"), int),
    **dict.fromkeys(("rng", "engine"), dict),
    "param_groups": list,
}
"""Of a position's values in JSON."""


def read_position(found: Artifact, name: str) -> TrainingPosition:
    """Read the position from a checkpoint's or a state's JSON file.

    Raises:
        PipelineError: the file is not JSON, or lacks a value or has one of another type.
    """
    document = read_document(found, name, TYPES)
    known = {f.name for f in fields(TrainingPosition)}
    return TrainingPosition(**{key: document[key] for key in known & document.keys()})


def read_document(found: Artifact, name: str, types: Mapping[str, type]) -> dict[str, Any]:
    """Read a JSON file of a published folder whose values have these types.

    Raises:
        PipelineError: the file is not JSON, or lacks a value or has one of another type.
    """
    path = found.path(name)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise PipelineError(f"{path}: not JSON ({error})", hint=HINT) from error
    for key, kind in types.items():
        value = document.get(key) if isinstance(document, dict) else None
        if not isinstance(value, kind):
            raise PipelineError(
                f"{path}: {key} is {value!r:.60}, not of the type {kind.__name__}", hint=HINT
            )
    return dict(document)
