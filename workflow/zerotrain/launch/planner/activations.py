"""Memory and operations of a micro batch, without parameters, gradients and optimizer.

A forward and a backward pass run on fake tensors (torch's FakeTensorMode), which have shapes, types
and lifetimes but no data. The blocks that gradient checkpointing would recompute are cut out: each
distinct one is traced once by itself, forwards and backwards, and represents all equal ones. The
passes over the rest of the model are then fast, whatever the depth.

Two simplifications, which both overestimate: an unused output of the last block counts as used
(Qwen-Image's text stream, one of 60 blocks), and blocks are recomputed to their end.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from zerotrain.artifact.tensor_file import MIXED_PRECISION
from zerotrain.launch.planner.forward import Forward
from zerotrain.launch.planner.gpu_operations import GpuOperations
from zerotrain.launch.planner.model import TrainedModel
from zerotrain.launch.planner.passes import Mode, Trace
from zerotrain.launch.planner.shape import Shape
from zerotrain.launch.planner.traced import Activations
from zerotrain.machine.progress_bar import Tell, ignore

MODES: tuple[Mode, ...] = ("plain", "checkpointed", "on_host")


def trace_activations(
    model: TrainedModel,
    shape: Shape,
    *,
    mixed_precision: str = "no",
    autocast: bool = False,
    device: str = "cuda",
    tell: Tell = ignore,
) -> Activations:
    """Trace a training step of one micro batch.

    Args:
        model: The run's model.
        shape: The micro batch.
        mixed_precision: `no`, `bf16` or `fp16`.
        autocast: Weights are float32 and are cast when used (plain PyTorch); otherwise they have
            the type of mixed_precision (DeepSpeed).
        device: The device type; on `cpu` attention and autocast differ from a GPU's.
        tell: Receives a text for each pass that starts.

    Raises:
        PipelineError: the model does not support such a batch.
    """
    dtype = torch.float32 if autocast else MIXED_PRECISION[mixed_precision]
    cast = MIXED_PRECISION[mixed_precision] if autocast and mixed_precision != "no" else None
    forward = Forward(model.architecture)
    # Some adapters have index tensors that are neither parameters nor buffers.
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake, _on_cpu(model.module, dtype), contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")  # of a GPU
        if device != "cpu":
            stack.enter_context(GpuOperations())
        loss = forward.loss_of(model.module, shape)
        trace = Trace(model.module, cast)
        passes = []
        for number, mode in enumerate(MODES, 1):
            tell(f"pass {number} of {len(MODES)}")
            passes.append(trace.run(loss, mode))
    plain, checkpointed, on_host = passes
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
    """Give a meta model fake CPU tensors of this type, and restore its own afterwards."""
    made: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            kind = dtype if tensor.is_floating_point() else tensor.dtype
            fake_tensor = torch.empty(tensor.shape, dtype=kind)
            if isinstance(tensor, torch.nn.Parameter):
                fake_tensor = torch.nn.Parameter(fake_tensor, requires_grad=tensor.requires_grad)
            made[id(tensor)] = fake_tensor
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
