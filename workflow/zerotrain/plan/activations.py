"""What a micro batch takes besides parameters, gradients and optimizer: bytes and operations.

A forward and a backward pass run on fake tensors (torch's FakeTensorMode), which have shapes, types
and lifetimes but no bytes. The blocks that gradient checkpointing would recompute are cut out: each
distinct one is traced by itself, once, forwards and backwards, and stands for all its like. The
passes over the rest of the model then need little time, whatever the depth.

Two simplifications, both upwards: an output of the last block that nobody uses counts as used
(Qwen-Image's text stream, one of 60 blocks), and blocks are recomputed to their end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from zerotrain.plan.forward import Shape, loss_of
from zerotrain.plan.gpu_operations import GpuOperations
from zerotrain.plan.model import TrainedModel
from zerotrain.plan.passes import Trace

DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Activations:
    """What one micro batch takes on a process's device, in bytes; parameters are not counted.

    A peak is the most that is alive at any moment of a forward and backward pass: what is saved for
    the backward pass, what operations hold meanwhile, and one parameter's gradient at a time.

    Attributes:
        saved: Saved for the backward pass without checkpointing.
        peak: The peak without checkpointing.
        checkpointed: Saved with gradient checkpointing: the blocks' inputs, and what is saved
            outside of the blocks.
        peak_checkpointed: The peak with gradient checkpointing.
        on_device: Saved on the device where the blocks' inputs go to the host.
        on_host: The copies of the blocks' inputs on the host (DeepSpeed's cpu_checkpointing).
        peak_on_host: The peak on the device where the blocks' inputs go to the host.
        blocks: How many blocks are checkpointed.
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
        """Operations of training on one sample."""
        more = self.recomputed_flops if checkpointing else 0
        return (self.forward_flops + self.backward_flops + more) / self.batch


def trace_activations(
    model: TrainedModel,
    shape: Shape,
    *,
    mixed_precision: str = "no",
    autocast: bool = False,
    device: str = "cuda",
) -> Activations:
    """Trace a training step of one micro batch.

    Args:
        model: The run's model.
        shape: The micro batch.
        mixed_precision: `no`, `bf16` or `fp16`.
        autocast: Weights are float32 and are cast as they are used (plain PyTorch); otherwise
            weights have the type of mixed_precision (DeepSpeed).
        device: The type of device; on `cpu` attention and autocast differ from a GPU's.

    Raises:
        PipelineError: the model cannot take such a batch.
    """
    dtype = torch.float32 if autocast else DTYPES[mixed_precision]
    cast = DTYPES[mixed_precision] if autocast and mixed_precision != "no" else None
    # Some adapters hold tensors of indices that are neither parameters nor buffers.
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake, _on_cpu(model.module, dtype), contextlib.ExitStack() as stack:
        if device != "cpu":
            stack.enter_context(GpuOperations())
        loss = loss_of(model.module, model.architecture, shape, dtype)
        trace = Trace(model.module, cast)
        plain = trace.run(loss, "plain")
        checkpointed = trace.run(loss, "checkpointed")
        on_host = trace.run(loss, "on_host")
    return Activations(
        saved=plain.saved,
        peak=plain.peak,
        checkpointed=checkpointed.saved,
        peak_checkpointed=checkpointed.peak,
        on_device=on_host.saved,
        on_host=on_host.host,
        peak_on_host=on_host.peak,
        blocks=plain.blocks,
        batch=shape.batch,
        forward_flops=plain.forward_flops,
        backward_flops=plain.backward_flops,
        recomputed_flops=plain.block_flops,
    )


@contextlib.contextmanager
def _on_cpu(model: torch.nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Give a meta model fake tensors of this type on CPU; afterwards its own again."""
    made: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            kind = dtype if tensor.is_floating_point() else tensor.dtype
            found = torch.empty(tensor.shape, dtype=kind)
            if isinstance(tensor, torch.nn.Parameter):
                found = torch.nn.Parameter(found, requires_grad=tensor.requires_grad)
            made[id(tensor)] = found
        return made[id(tensor)]

    kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for module in model.modules():
        holders: tuple[Any, ...] = (module._parameters, module._buffers, vars(module))
        for values in holders:
            tensors = {name: x for name, x in values.items() if isinstance(x, torch.Tensor)}
            if tensors:
                kept.append((values, tensors))
    for values, tensors in kept:
        values.update({name: fake(tensor) for name, tensor in tensors.items()})
    try:
        yield
    finally:
        for values, tensors in kept:
            values.update(tensors)
