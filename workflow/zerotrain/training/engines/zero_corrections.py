"""What DeepSpeed lacks or does wrong: clipping of each gradient value, and swapping to a disk, with
a separate folder and gradients that are read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.swap_tensor.utils import swap_in_tensors


def clip_each_value(zero: Any, bound: float, stage: int) -> None:
    """Make a ZeRO optimizer clamp every value of its gradients to [-bound, bound].

    DeepSpeed (0.19) passes each partition of the averaged, accumulated float32 gradient through
    `unscale_and_clip_grads` right before its step, after the check for infinite values. Its own
    clipping by norm must be off: gradient_clipping 0.
    """
    unscale = zero.unscale_and_clip_grads

    def unscale_and_clamp(partitions: Any, total_norm: Any) -> None:
        unscale(partitions, total_norm)
        if stage == 3:  # its argument is the number of a sub-group
            partitions = [zero.fp32_partitioned_groups_flat[partitions].grad]
        for partition in partitions:
            for gradient in partition if isinstance(partition, list) else [partition]:
                gradient.data.clamp_(-bound, bound)

    zero.unscale_and_clip_grads = unscale_and_clamp


def point_to(config: dict[str, Any], swap: Path) -> None:
    """Make everything that a DeepSpeed configuration swaps to NVMe use the folder."""
    for section in config["zero_optimization"].values():
        if isinstance(section, dict) and section.get("device") == "nvme":
            section["nvme_path"] = str(swap)


def read_gradients_through_aligned_memory(zero: Any) -> None:
    """Fix how DeepSpeed 0.19 reads swapped gradients back.

    It reads each parameter's file (O_DIRECT) directly to the parameter's place in the gradient of
    its sub-group. Only the sub-group's start is aligned for that; at any other place the kernel
    refuses, the result is not checked, and the update uses what was in memory before. A tensor
    that is not page-locked goes through one of DeepSpeed's aligned buffers.
    """
    swapper = getattr(zero, "optimizer_swapper", None)
    if swapper is None:
        return

    def read(aio_handle: Any, parameter: Any, gradient_tensor: torch.Tensor) -> None:
        for swapped in swapper.swap_params_info[parameter.ds_id].swapped_gradients.values():
            part = torch.empty(swapped.length, dtype=gradient_tensor.dtype)
            swap_in_tensors(aio_handle, [part], [swapped.path])
            if aio_handle.wait() != 1:
                raise OSError(f"{swapped.path}: cannot be read")
            gradient_tensor.narrow(0, swapped.offset, swapped.length).copy_(part)

    swapper._swap_in_pinned_gradients = read
