"""What the arithmetic of memory is done with: a model's sizes and a launch's values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

from zerotrain.launch.resolved import ResolvedPhase

FP32 = 4
ITEM_BYTES = {"no": 4, "bf16": 2, "fp16": 2}
"""Bytes of a weight as forward and backward passes of DeepSpeed see it, by precision."""
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
"""DeepSpeed's own, of its zero_optimization section (deepspeed/runtime/zero/config.py).
overlap_comm is on by default at stage 3, where the buckets are the same with it."""
OFFLOAD_DEFAULTS: dict[str, dict[str, Any]] = {
    "offload_optimizer": {"buffer_count": 4, "pin_memory": True},
    "offload_param": {
        "buffer_count": 5,
        "buffer_size": 100_000_000,
        "max_in_cpu": 1_000_000_000,
        "pin_memory": True,
    },
}
"""DeepSpeed's own (deepspeed/runtime/zero/offload_config.py)."""


@dataclass(frozen=True)
class ParameterSizes:
    """The elements of a model's parameters, in the order of the model.

    Attributes:
        parameters: Elements of each, by name.
        trained: The names of those that are trained, group by group of the optimizer.
        stored_bytes: Bytes of an element in the base model's files.
    """

    parameters: Mapping[str, int]
    trained: tuple[tuple[str, ...], ...]
    stored_bytes: int = FP32

    @classmethod
    def of(
        cls,
        shapes: Mapping[str, Sequence[int]],
        groups: Sequence[Sequence[str]] | None = None,
        stored_bytes: int = FP32,
    ) -> ParameterSizes:
        """Sizes of the parameters of these shapes; without groups all are trained in one."""
        parameters = {name: prod(shape) for name, shape in shapes.items()}
        chosen = tuple(map(tuple, groups)) if groups is not None else (tuple(parameters),)
        return cls(parameters, chosen, stored_bytes)

    @property
    def groups(self) -> list[list[int]]:
        """Elements of the trained parameters, group by group."""
        return [[self.parameters[name] for name in names] for names in self.trained]

    @property
    def trained_numel(self) -> int:
        """Trained elements."""
        return sum(map(sum, self.groups))

    @property
    def frozen(self) -> list[int]:
        """Elements of the parameters that are not trained."""
        trained = {name for names in self.trained for name in names}
        return [numel for name, numel in self.parameters.items() if name not in trained]

    @property
    def frozen_numel(self) -> int:
        """Elements that are not trained."""
        return sum(self.frozen)

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
        """Elements of the trained parameters as their gradients come: roughly the last first."""
        trained = {name for names in self.trained for name in names}
        return [
            self.parameters[name] for name in reversed(list(self.parameters)) if name in trained
        ]

    @property
    def modules(self) -> list[list[str]]:
        """The parameters' names, by the module that has them itself, roughly as they are called."""
        found: dict[str, list[str]] = {}
        for name in self.parameters:
            found.setdefault(name.rpartition(".")[0], []).append(name)
        return list(found.values())


@dataclass(frozen=True, kw_only=True)
class PlannedLaunch:
    """The values of a launch that decide what memory it takes.

    Attributes:
        engine: torch, or DeepSpeed.
        stage: ZeRO stage; 0 for torch.
        offload_optimizer: none, cpu or nvme.
        offload_param: none, cpu or nvme.
        mixed_precision: no, bf16 or fp16.
        processes: How many there are, one a device, all on one machine.
        accumulation: Micro batches of a step.
        zero: DeepSpeed's zero_optimization section.
        slots: The optimizer's float32 values of a parameter: Adam has two moments.
        slot_bytes: Bytes that the optimizer takes of a parameter of so many elements, where that is
            not 4 for each slot; on the disk it is.
        cpu: Whether the device is the CPU: then nothing is copied from host to device, and memory
            is taken when it is written to.
        exact: Whether the masters come from the model, as at the start of a run; else from a state.
        keep: Rolling checkpoints that stay.
        init: Whether ZeRO-3 partitions each parameter as it is read (launch.zero3_init).
        average: Whether a moving average of the weights is kept.
        average_on_host: Whether the host keeps it though the masters are on the device.
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
    slot_bytes: Callable[[int], int] | None = None
    cpu: bool = False
    exact: bool = True
    keep: int = 2
    init: bool = False
    average: bool = False
    average_on_host: bool = False

    @classmethod
    def of(cls, phase: ResolvedPhase, zero: Mapping[str, Any], **values: Any) -> PlannedLaunch:
        """The launch of a resolved phase whose zero_optimization section is `zero`."""
        return cls(
            engine=phase.engine,
            stage=phase.zero_stage,
            offload_optimizer=phase.offload_optimizer,
            offload_param=phase.offload_param,
            mixed_precision=phase.mixed_precision,
            processes=phase.num_processes,
            accumulation=phase.gradient_accumulation_steps,
            keep=phase.keep,
            init=phase.zero3_init,
            average=phase.use_ema,
            average_on_host=phase.ema_device == "cpu",
            zero=zero,
            **values,
        )

    @property
    def item(self) -> int:
        """Bytes of a weight as DeepSpeed's passes see it, and of its gradient."""
        return ITEM_BYTES[self.mixed_precision]

    def value(self, key: str) -> Any:
        """A value of zero_optimization, or DeepSpeed's default."""
        return self.zero.get(key, DEFAULTS[key])

    def offload(self, target: str, key: str) -> Any:
        """A value of offload_optimizer or offload_param, or DeepSpeed's default."""
        return (self.zero.get(target) or {}).get(key, OFFLOAD_DEFAULTS[target][key])

    def pinned(self, target: str) -> bool:
        """Whether a target's host memory is page-locked: on a CPU it is not."""
        return not self.cpu and bool(self.offload(target, "pin_memory"))
