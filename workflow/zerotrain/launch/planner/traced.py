"""Results of tracing a run's model, without torch: shapes of parameters, and activations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from zerotrain.launch.planner.architecture import Architecture
from zerotrain.launch.planner.inputs import ParameterSizes
from zerotrain.machine.detect import Engine
from zerotrain.models.sizes import ModelSizes, sum_up

ENGINES: tuple[Engine, ...] = ("torch", "deepspeed")


@dataclass(frozen=True)
class Activations:
    """Memory of one micro batch on a process's device, in bytes, without parameters.

    A peak is the maximum over a forward and backward pass of the bytes alive: tensors saved for the
    backward pass, temporaries of operations, and one parameter's gradient at a time.

    Attributes:
        saved: Bytes saved for the backward pass without checkpointing.
        peak: The peak without checkpointing.
        checkpointed: Bytes saved with gradient checkpointing: the blocks' inputs, and tensors saved
            outside of the blocks.
        peak_checkpointed: The peak with gradient checkpointing.
        on_device: Bytes saved on the device if the blocks' inputs go to the host.
        on_host: The copies of the blocks' inputs on the host (DeepSpeed's cpu_checkpointing).
        peak_on_host: The peak on the device if the blocks' inputs go to the host.
        blocks: Number of checkpointed blocks.
        batch: Samples of the micro batch.
        forward_flops: Operations of the forward pass, a multiply-add as two.
        backward_flops: Operations of the backward pass, without any recomputation.
        recomputed_flops: Operations that checkpointing adds.
    """

    saved: int
    peak: int
    checkpointed: int
    peak_checkpointed: int
    on_device: int
    on_host: int
    peak_on_host: int
    blocks: int
    batch: int
    forward_flops: int
    backward_flops: int
    recomputed_flops: int

    def flops_per_sample(self, checkpointing: bool) -> float:
        """Return the operations of training on one sample."""
        more = self.recomputed_flops if checkpointing else 0
        return (self.forward_flops + self.backward_flops + more) / self.batch


@dataclass(frozen=True)
class ModelShapes:
    """A run's model as the training uses it.

    Attributes:
        architecture: Parts of the base.
        shapes: The shape of each parameter, a tied one under the first of its names.
        trained: Names of the trained parameters.
        quantized: Bytes of each quantized parameter.
    """

    architecture: Architecture
    shapes: Mapping[str, tuple[int, ...]]
    trained: tuple[str, ...]
    quantized: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(map(prod, self.shapes.values()))

    @cached_property
    def trained_parameters(self) -> int:
        """Number of trained parameters."""
        return sum(prod(self.shapes[name]) for name in self.trained)


@dataclass(frozen=True)
class TracedModel:
    """The model, and the memory of a micro batch under the requested engines."""

    model: ModelShapes
    engines: Mapping[Engine, Activations]

    @property
    def batch(self) -> int:
        """Samples of the micro batch."""
        return next(iter(self.engines.values())).batch

    @cached_property
    def parameters(self) -> ParameterSizes:
        """Elements of every parameter; the optimizer has one group."""
        return ParameterSizes.of(
            self.model.shapes, [list(self.model.trained)], quantized=self.model.quantized
        )

    @cached_property
    def sizes(self) -> ModelSizes:
        """Sizes from which ZeRO's buckets are derived."""
        parameters = self.parameters.parameters
        return sum_up(self.model.shapes, {name: parameters[name] for name in self.model.trained})
