"""The state of a training without its tensors: the JSON of a checkpoint and of a state."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Protocol

from zerotrain.artifact import Artifact
from zerotrain.errors import PipelineError

if TYPE_CHECKING:
    import torch

MASTER, EMA_SLOT = "master", "ema"
"""Slots of every engine: the float32 weights, and their average if a training keeps one."""
ADAM_SLOTS = ("exp_avg", "exp_avg_sq")
"""Adam's names of its moments."""


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """Step, samples, optimizer, schedule, randomness and their origin."""

    run: str
    phase: str
    step: int
    """Completed global optimizer steps."""
    samples: int
    """Samples drawn since the start of the run: the position of the sampler."""
    optimizer: str
    optimizer_step: int
    """Number of updates by the optimizer, which determines Adam's bias correction."""
    param_groups: list[dict[str, Any]]
    """Parameter names, learning rate, weight_decay and the optimizer's values of each group;
    `scalars` has numbers that it keeps in addition to tensors and count, such as NAdam's."""
    lr_scheduler: str
    lr_scheduler_steps: int
    rng: dict[str, Any]
    """The seed; every draw is a function of (seed, epoch, sample) or (seed, step, rank)."""
    engine: dict[str, Any]
    """The engine's values: preset, engine, zero_stage, offload_optimizer, offload_param,
    world_size, mixed_precision, global_batch_size, gradient_accumulation_steps."""
    loss_scale: dict[str, Any] | None = None
    """fp16 only: {"scale": 65536.0, "good_steps": 12, "hysteresis": 1}: the scale, the good steps
    since its last change, and the overflows until it is halved."""
    ran_on: dict[str, Any] = field(default_factory=dict)
    """The conditions of the last steps: code, versions, device, threads, values that affect only
    rounding; flat, by key. Empty if they were not recorded."""
    history: list[dict[str, Any]] = field(default_factory=list)
    """Changes within the run, in the order of steps: each {"step", "key", "old", "new"}; `step` is
    the last one before the change."""


class Source(Protocol):
    """A State, a Checkpoint or an external checkpoint, read tensor by tensor."""

    @property
    def position(self) -> TrainerState: ...
    @property
    def shapes(self) -> dict[str, list[int]]: ...
    @property
    def names(self) -> list[str]: ...
    @property
    def slots(self) -> list[str]: ...
    def tensor(self, name: str, slot: str) -> torch.Tensor: ...


HINT = "no version of this program writes that: do not use it if you do not know who made it"
TYPES: dict[str, type] = {
    **dict.fromkeys(("run", "phase", "optimizer", "lr_scheduler"), str),
    **dict.fromkeys(("step", "samples", "optimizer_step", "lr_scheduler_steps"), int),
    **dict.fromkeys(("rng", "engine"), dict),
    "param_groups": list,
}
"""Types of a position's values in JSON."""
ADDED_LATER: dict[str, type] = {"ran_on": dict, "history": list}
"""Types of values that positions of earlier versions lack."""


def as_document(position: TrainerState) -> dict[str, Any]:
    """Return the JSON of a position, without empty fields from ADDED_LATER.

    So a file that is made again from an earlier version's file keeps its bytes, and trainings that
    started from it still match.
    """
    fields = asdict(position)
    return {key: fields[key] for key in fields if key not in ADDED_LATER or fields[key]}


def read_position(artifact: Artifact, name: str) -> TrainerState:
    """Read the position from a checkpoint's or a state's JSON file.

    Raises:
        PipelineError: the file is not JSON, or a value is missing or of another type.
    """
    document = read_document(artifact, name, TYPES)
    read_document(artifact, name, {k: t for k, t in ADDED_LATER.items() if k in document})
    known = {f.name for f in fields(TrainerState)}
    return TrainerState(**{key: document[key] for key in known & document.keys()})


def read_document(artifact: Artifact, name: str, types: Mapping[str, type]) -> dict[str, Any]:
    """Read a JSON file of a published folder and check its values' types.

    Raises:
        PipelineError: the file is not JSON, or a value is missing or of another type.
    """
    path = artifact.path(name)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise PipelineError(f"{path}: not JSON ({error})", hint=HINT) from error
    if not isinstance(document, dict):
        raise PipelineError(f"{path}: {document!r:.60} instead of an object", hint=HINT)
    for key, kind in types.items():
        value = document.get(key)
        if not isinstance(value, kind):
            raise PipelineError(
                f"{path}: {key} is {value!r:.60}, not of the type {kind.__name__}", hint=HINT
            )
    return document
