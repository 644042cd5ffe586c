"""Terms of the memory arithmetic: a model's sizes, a launch's values, parts and their moments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import prod
from typing import Any, Literal

from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.launch.zero import LIMIT_MIB

FP32 = 4
NORM = 8
"""Bytes per gradient element while its norm is computed, in float64."""
LOCKED = f"torch locks pages of up to {LIMIT_MIB} MiB in powers of two (zerotrain/launch/zero.py)"
"""Why page-locked memory takes more than its tensors."""
ITEM_BYTES = {"no": 4, "bf16": 2, "fp16": 2}
"""Bytes of a weight in DeepSpeed's forward and backward passes, by precision."""
DEFAULTS: dict[str, Any] = {
    "reduce_bucket_size": 500_000_000,
    "overlap_comm": False,
    "contiguous_gradients": True,
    "reduce_scatter": True,
    "sub_group_size": 1_000_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_param_persistence_threshold": 100_000,
    "stage3_model_persistence_threshold": 2**63 - 1,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
}
"""DeepSpeed's defaults in its zero_optimization section (deepspeed/runtime/zero/config.py).
overlap_comm is on by default at stage 3, whose buckets do not depend on it."""
OFFLOAD_DEFAULTS: dict[str, dict[str, Any]] = {
    "offload_optimizer": {"buffer_count": 4, "pin_memory": True},
    "offload_param": {
        "buffer_count": 5,
        "buffer_size": 100_000_000,
        "max_in_cpu": 1_000_000_000,
        "pin_memory": True,
    },
}
"""DeepSpeed's defaults (deepspeed/runtime/zero/offload_config.py)."""


@dataclass(frozen=True)
class ParameterSizes:
    """Elements of a model's parameters, in the order of the model.

    Attributes:
        parameters: Elements of each parameter, by name.
        trained: Names of the trained ones, by group of the optimizer.
        stored_bytes: Bytes of an element in the base model's files.
        quantized: Bytes of each quantized parameter, by name.
    """

    parameters: Mapping[str, int]
    trained: tuple[tuple[str, ...], ...]
    stored_bytes: int = FP32
    quantized: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        shapes: Mapping[str, Sequence[int]],
        groups: Sequence[Sequence[str]] | None = None,
        stored_bytes: int = FP32,
        quantized: Mapping[str, int] | None = None,
    ) -> ParameterSizes:
        """Return the sizes for these shapes; without groups, all are trained in one."""
        parameters = {name: prod(shape) for name, shape in shapes.items()}
        chosen = tuple(map(tuple, groups)) if groups is not None else (tuple(parameters),)
        return cls(parameters, chosen, stored_bytes, quantized or {})

    @property
    def groups(self) -> list[list[int]]:
        """Elements of the trained parameters, by group."""
        return [[self.parameters[name] for name in names] for names in self.trained]

    @property
    def trained_numel(self) -> int:
        """Trained elements."""
        return sum(map(sum, self.groups))

    @property
    def frozen(self) -> list[int]:
        """Elements of the parameters that are neither trained nor quantized."""
        other = {name for names in self.trained for name in names} | self.quantized.keys()
        return [numel for name, numel in self.parameters.items() if name not in other]

    @property
    def frozen_numel(self) -> int:
        """Elements that are neither trained nor quantized."""
        return sum(self.frozen)

    @property
    def quantized_numel(self) -> int:
        """Elements of quantized parameters."""
        return sum(self.parameters[name] for name in self.quantized)

    @property
    def numel(self) -> int:
        """All elements."""
        return sum(self.parameters.values())

    @property
    def largest(self) -> int:
        """Elements of the largest trained parameter."""
        return max(map(max, self.groups))

    @property
    def backward_order(self) -> list[int]:
        """Elements of the trained parameters in the order of their gradients, about last first."""
        trained = {name for names in self.trained for name in names}
        return [
            self.parameters[name] for name in reversed(list(self.parameters)) if name in trained
        ]

    @property
    def modules(self) -> list[list[str]]:
        """Names of the parameters by their direct module, roughly in the order of calls."""
        modules: dict[str, list[str]] = {}
        for name in self.parameters:
            modules.setdefault(name.rpartition(".")[0], []).append(name)
        return list(modules.values())


@dataclass(frozen=True, kw_only=True)
class PlannedLaunch:
    """Values of a launch that determine its memory.

    Attributes:
        engine: torch, or DeepSpeed.
        stage: ZeRO stage; 0 for torch.
        offload_optimizer: none, cpu or nvme.
        offload_param: none, cpu or nvme.
        mixed_precision: no, bf16 or fp16.
        processes: Number of processes, one per device, all on one machine.
        accumulation: Micro batches per step.
        zero: DeepSpeed's zero_optimization section.
        slots: The optimizer's values per parameter: Adam has two moments.
        bf16_states: Whether an offloaded optimizer stores them in bf16 (bf16_optimizer_states).
        slot_bytes: Function from a parameter's elements to its optimizer bytes in memory; None: 4
            bytes per slot, as always on the disk.
        cpu: Whether the device is the CPU: then nothing is copied from host to device, and memory
            is only used once it is written.
        exact: Whether the masters come from the model, as at the start of a run; else from a state.
        keep: Rolling checkpoints that are kept.
        init: Whether ZeRO-3 partitions each parameter while reading it (launch.zero3_init).
        average: Whether a moving average of the weights is kept.
        average_on_host: Whether it is on the host even if the masters are on the device.
    """

    engine: Literal["torch", "deepspeed"]
    stage: int = 0
    offload_optimizer: str = "none"
    offload_param: str = "none"
    mixed_precision: str = "no"
    processes: int = 1
    accumulation: int = 1
    zero: Mapping[str, Any] = field(default_factory=dict)
    slots: int = 2
    bf16_states: bool = False
    slot_bytes: Callable[[int], int] | None = None
    cpu: bool = False
    exact: bool = True
    keep: int = 2
    init: bool = False
    average: bool = False
    average_on_host: bool = False

    @classmethod
    def of(cls, phase: ResolvedPhase, zero: Mapping[str, Any], **values: Any) -> PlannedLaunch:
        """Return the launch of a resolved phase whose zero_optimization section is `zero`."""
        return cls(
            engine=phase.derived.engine,
            stage=phase.derived.zero_stage,
            offload_optimizer=phase.derived.offload_optimizer,
            offload_param=phase.derived.offload_param,
            mixed_precision=phase.launch.mixed_precision,
            processes=phase.launch.num_processes,
            accumulation=phase.train.gradient_accumulation_steps,
            bf16_states=phase.launch.bf16_optimizer_states,
            keep=phase.train.keep,
            init=phase.launch.zero3_init,
            average=phase.train.use_ema,
            average_on_host=phase.train.ema_device == "cpu",
            zero=zero,
            **values,
        )

    @property
    def item(self) -> int:
        """Bytes of a weight in DeepSpeed's passes, and of its gradient."""
        return ITEM_BYTES[self.mixed_precision]

    @property
    def slot_item(self) -> int:
        """Bytes of an optimizer slot's value under DeepSpeed."""
        return 2 if self.bf16_states and self.offload_optimizer == "cpu" else FP32

    def value(self, key: str) -> Any:
        """Return a value of zero_optimization, or DeepSpeed's default."""
        return self.zero.get(key, DEFAULTS[key])

    def offload(self, target: str, key: str) -> Any:
        """Return a value of offload_optimizer or offload_param, or DeepSpeed's default."""
        return (self.zero.get(target) or {}).get(key, OFFLOAD_DEFAULTS[target][key])

    def is_pinned(self, target: str) -> bool:
        """Return whether a target's host memory is page-locked: on a CPU it is not."""
        return not self.cpu and bool(self.offload(target, "pin_memory"))


Place = Literal["device", "host"]


class Moment(StrEnum):
    """Moments of a training, in order; between two of them memory is allocated or freed."""

    LOAD = "load the model"
    PLACE = "place and cast it"
    FLATTEN = "flatten the weights"
    MASTERS = "copy the masters"
    BUFFERS = "make the buffers"
    BUCKETS = "make the buckets"
    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCE = "reduce a bucket"
    CLIP = "take the norm"
    STEP = "optimizer step"
    GATHER = "gather the new weights"
    SAVE = "save"


ALWAYS = tuple(Moment)
TRAINING = ALWAYS[ALWAYS.index(Moment.FORWARD) :]
"""Moments from the first step on."""


def since(first: Moment, last: Moment = Moment.SAVE) -> tuple[Moment, ...]:
    """Return the moments from one to another, both included."""
    return ALWAYS[ALWAYS.index(first) : ALWAYS.index(last) + 1]


@dataclass(frozen=True)
class MemoryPart:
    """Part of one process's memory.

    Attributes:
        name: Name of the part.
        bytes: Its size in bytes.
        where: On the device, or in host memory.
        when: The moments at which it exists.
        why: Its arithmetic, and the code that allocates it.
        state: Whether it is a model state that ZeRO's arithmetic counts (weights, gradients,
            masters, moments), not a buffer or a copy.
        touched: Bytes of it that are ever written. CPU memory is only used once it is written;
            device and page-locked memory is used at once.
    """

    name: str
    bytes: int
    where: Place
    when: tuple[Moment, ...]
    why: str
    state: bool = False
    touched: int | None = None

    @property
    def resident(self) -> int:
        """Bytes that count in CPU memory, which is only used once it is written."""
        return self.bytes if self.touched is None else self.touched


def at(parts: Iterable[MemoryPart], moment: Moment, where: Place) -> int:
    """Return the bytes of a place that are in use at a moment."""
    return sum(part.bytes for part in parts if part.where == where and moment in part.when)


def peak(parts: Iterable[MemoryPart], where: Place) -> tuple[int, Moment]:
    """Return the peak bytes of a place, and the first moment with that peak."""
    parts = list(parts)
    return max(
        ((at(parts, moment, where), moment) for moment in Moment), key=lambda entry: entry[0]
    )


def resident_peak(parts: Iterable[MemoryPart]) -> tuple[int, Moment]:
    """Return the peak bytes and its moment if device and host share one memory, as on a CPU."""
    parts = list(parts)
    sums = [(sum(p.resident for p in parts if moment in p.when), moment) for moment in Moment]
    return max(sums, key=lambda sum_: sum_[0])


def states(parts: Iterable[MemoryPart], where: Place) -> int:
    """Return the bytes of the model states in a place."""
    return sum(part.bytes for part in parts if part.state and part.where == where)
