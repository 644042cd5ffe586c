"""The state of a training without its tensors: the JSON of a checkpoint and of a state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from pydantic import AfterValidator, Field

from zerotrain.artifact import Artifact
from zerotrain.artifact.documents import read_record

if TYPE_CHECKING:
    import torch

MASTER, EMA_SLOT = "master", "ema"
"""Slots of every engine: the float32 weights, and their average if a training keeps one."""
ADAM_SLOTS = ("exp_avg", "exp_avg_sq")
"""Adam's names of its moments."""


Count = Annotated[int, Field(strict=True, ge=0)]
"""A whole number of a document, 0 or more."""


def _check_scale(found: dict[str, Any]) -> dict[str, Any]:
    numbers = [found.get("scale"), found.get("good_steps"), found.get("hysteresis", 1)]
    if any(type(number) not in (int, float) or number < 0 for number in numbers):
        raise ValueError("scale, good_steps and hysteresis are numbers from 0 on")
    return found


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """Step, samples, optimizer, schedule, randomness and their origin."""

    run: str
    phase: str
    step: Count
    """Completed global optimizer steps."""
    samples: Count
    """Samples drawn since the start of the run: the position of the sampler."""
    optimizer: str
    optimizer_step: Count
    """Number of updates by the optimizer, which determines Adam's bias correction."""
    param_groups: list[dict[str, Any]]
    """Parameter names, learning rate, weight_decay and the optimizer's values of each group;
    `scalars` has numbers that it keeps in addition to tensors and count, such as NAdam's."""
    lr_scheduler: str
    lr_scheduler_steps: Count
    rng: dict[str, Any]
    """The seed; every draw is a function of (seed, epoch, sample) or (seed, step, rank)."""
    engine: dict[str, Any]
    """The engine's values: preset, engine, zero_stage, offload_optimizer, offload_param,
    world_size, mixed_precision, global_batch_size, gradient_accumulation_steps."""
    loss_scale: Annotated[dict[str, Any], AfterValidator(_check_scale)] | None = None
    """fp16 only: {"scale": 65536.0, "good_steps": 12, "hysteresis": 1}: the scale, the good steps
    since its last change, and the overflows until it is halved."""
    ran_on: dict[str, Any]
    """The conditions of the last steps: versions, device, threads, values that affect only
    rounding; flat, by key. Empty if they were not recorded."""
    history: list[dict[str, Any]]
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


def read_position(artifact: Artifact, name: str) -> TrainerState:
    """Read the position from a checkpoint's or a state's JSON file.

    Raises:
        PipelineError: the file is not JSON, or a value is missing or of another type.
    """
    return read_record(artifact.path(name), TrainerState, hint=HINT)


@dataclass
class StepCounter:
    """The training's step and sample count, and the horizon of its schedule."""

    step: int
    samples: int
    horizon: int
    """lr_scheduler_steps."""
