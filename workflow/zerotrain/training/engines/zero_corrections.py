"""What DeepSpeed lacks or does wrong, or does at every start without need.

These are the memory and seconds of its start, the loss scale of a step, clipping of each gradient
value, and swapping to a disk, with a separate folder and gradients that are read back.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cpuinfo
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.swap_tensor.utils import swap_in_tensors
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from zerotrain.artifact.documents import read_object
from zerotrain.machine.compiled_ops import ops_folder
from zerotrain.machine.regular_file import write_text


class _ClonedToHost(torch.Tensor):
    """A view of which `clone` makes a copy in host memory."""

    def clone(self, **_: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).to("cpu", copy=True)


@contextlib.contextmanager
def one_copy_on_device(*, alone: bool) -> Iterator[None]:
    """Make DeepSpeed 0.19 start stages 1 and 2 with one copy of the weights on the device.

    Only for masters in host memory, whose training needs no second copy: DeepSpeed makes the
    weights flat on the device if it has room for both, and clones its partition there before it
    copies it to the host. A GPU with room for the steps would run out of memory before the first.

    Args:
        alone: Whether this is the only process. It makes the weights flat in host memory, where
            several processes would each hold the whole model twice.
    """
    partitions_of = DeepSpeedZeroOptimizer.get_data_parallel_partitions
    made: list[list[torch.Tensor]] = []

    def cloned_to_host(zero: Any, flat: torch.Tensor, group: int) -> list[torch.Tensor]:
        made.append([one.as_subclass(_ClonedToHost) for one in partitions_of(zero, flat, group)])
        return made[-1]

    with contextlib.ExitStack() as stack:
        DeepSpeedZeroOptimizer.get_data_parallel_partitions = cloned_to_host
        stack.callback(
            setattr, DeepSpeedZeroOptimizer, "get_data_parallel_partitions", partitions_of
        )
        if alone:
            accelerator = get_accelerator()
            accelerator.available_memory = lambda device_index=None: 0
            stack.callback(delattr, accelerator, "available_memory")
        yield
    for partitions in made:  # the optimizer's own lists
        partitions[:] = [one.as_subclass(torch.Tensor) for one in partitions]


def raise_scale_after_step(zero: Any) -> Callable[[], None]:
    """Make a ZeRO optimizer use one loss scale for a whole step.

    DeepSpeed 0.19 raises fp16's scale after a window of good steps before it divides the gradients
    by it: that update is half as large as the gradients say. An overflow still lowers it at once.

    Returns:
        What to call after each step without an overflow.
    """
    update = zero._update_scale

    def lower(overflow: bool = False) -> None:
        if overflow:
            update(True)

    zero._update_scale = lower
    return lambda: update(False)


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


MUON = "deepspeed.runtime.zero.muon.muon_optimizer"
PROCESSOR = "processor.json"
"""File in the folder of the compiled ops, which is specific to this processor."""


def import_muon() -> None:
    """Import DeepSpeed's Muon as deepspeed.initialize would, but leave its functions uncompiled.

    Decorating them imports all of torch's compiler, and nothing here uses them.
    """
    compiler, torch.compile = torch.compile, _skip_compilation  # type: ignore[assignment]
    try:
        importlib.import_module(MUON)
    finally:
        torch.compile = compiler


def _skip_compilation(function: Callable[..., Any] | None = None, **_: Any) -> Any:
    return _skip_compilation if function is None else function


def remember_processor() -> None:
    """Make cpuinfo inspect the processor only once.

    An inspection runs programs for a second or two, and each op that DeepSpeed loads makes one.
    """
    if getattr(cpuinfo.get_cpu_info, "__module__", "").startswith(cpuinfo.__name__):
        cpuinfo.get_cpu_info = functools.cache(
            functools.partial(_read_or_detect, cpuinfo.get_cpu_info)
        )


def _read_or_detect(look: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    path = ops_folder() / PROCESSOR
    with contextlib.suppress(OSError, ValueError):
        return read_object(path)
    processor = look()
    draft = path.with_name(f"{PROCESSOR}.new-{os.getpid()}")
    with contextlib.suppress(OSError):  # the folder may be read-only
        write_text(draft, json.dumps(processor))
        draft.replace(path)
    return processor
