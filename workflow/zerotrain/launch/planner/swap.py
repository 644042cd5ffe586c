"""Stage 3 on a disk: the swapped tensors, their files, and the host memory for swapping.

Source: deepspeed/runtime/swap_tensor/*.py of DeepSpeed 0.19.8.
"""

from __future__ import annotations

from dataclasses import dataclass

from zerotrain.launch.planner.buckets import round_up
from zerotrain.launch.planner.inputs import FP32, ParameterSizes, PlannedLaunch
from zerotrain.launch.planner.parts import MemoryPart, Moment, since

LEAST_BYTES = 2**20
"""Least bytes of a swapped tensor (utils.py: MIN_AIO_BYTES; aio.block_size is no larger)."""
ALIGNED_BYTES = 1024
"""utils.py: AIO_ALIGNED_BYTES, with the default of one thread per request."""


@dataclass(frozen=True)
class SwappedElements:
    """Elements that a process swaps.

    Attributes:
        optimizer: Elements whose masters, moments and gradients are swapped.
        weights: Elements of the trained weights that are on the disk and not in memory.
        kept: Elements of the largest sub-group among these, which is written at once; 0 if there is
            no such sub-group.
    """

    optimizer: int = 0
    weights: int = 0
    kept: int = 0

    @classmethod
    def of(cls, launch: PlannedLaunch, model: ParameterSizes, groups: list[int]) -> SwappedElements:
        """Return the values for a launch; `groups` are the elements of the sub-groups.

        The first offload_param.max_in_cpu elements stay in host memory whatever the device setting
        (stage3.py: _create_param_groups_fp16_flat_cpu_memory).
        """
        swapped = launch.offload_optimizer == "nvme"
        optimizer = sum(g for g in groups if FP32 * g >= LEAST_BYTES) if swapped else 0
        if launch.offload_param != "nvme":
            return cls(optimizer)
        room, out = int(launch.offload("offload_param", "max_in_cpu")), []
        held = 0
        for group in groups:
            held += group
            if held > room:
                out.append(group)
        return cls(optimizer, sum(out), max(out, default=0))


def swap_parts(
    launch: PlannedLaunch, model: ParameterSizes, groups: list[int], swapped: SwappedElements
) -> list[MemoryPart]:
    """Return the host memory for swapping; aio locks it itself, without rounding."""
    parts = []
    if launch.offload_optimizer == "nvme":
        count = int(launch.offload("offload_optimizer", "buffer_count"))
        parts.append(
            MemoryPart(
                "buffers of the optimizer's swapping",
                count * round_up(FP32 * max(groups), ALIGNED_BYTES), "host", since(Moment.MASTERS),
                "buffer_count x 4 B a parameter of the largest sub-group (optimizer_utils.py: "
                "SwapBufferManager)",
            )
        )  # fmt: skip
    if launch.offload_param == "nvme":
        count = int(launch.offload("offload_param", "buffer_count"))
        size = int(launch.offload("offload_param", "buffer_size"))
        parts.append(
            MemoryPart(
                "buffers of the weights' swapping",
                count * round_up(launch.item * size, ALIGNED_BYTES), "host", since(Moment.PLACE),
                f"buffer_count x buffer_size x {launch.item} B (partitioned_param_swapper.py)",
            )
        )  # fmt: skip
    if swapped.kept:
        parts.append(
            MemoryPart(
                "weights on their way to the disk", launch.item * swapped.kept, "host",
                since(Moment.FLATTEN), f"{launch.item} B a parameter of the largest sub-group "
                "(partitioned_param_swapper.py: reserve_partitioned_swap_space)",
            )
        )  # fmt: skip
    return parts


def swap_file_bytes(
    launch: PlannedLaunch, model: ParameterSizes, groups: list[int]
) -> dict[str, int]:
    """Return the bytes of one process's swap files by content; for gradients an upper bound."""
    sizes: dict[str, int] = {}
    if launch.offload_optimizer == "nvme":
        big = [FP32 * group for group in groups if FP32 * group >= LEAST_BYTES]
        each = sum(round_up(size, ALIGNED_BYTES) for size in big)
        sizes["masters"] = each
        sizes["optimizer states"] = launch.slots * each
        cuts = [FP32 * -(-n // launch.processes) for group in model.groups for n in group]
        sizes["gradients"] = sum(s - s % ALIGNED_BYTES for s in cuts if s >= LEAST_BYTES)
    if launch.offload_param == "nvme":
        cuts = [launch.item * -(-n // launch.processes) for n in model.parameters.values()]
        sizes["weights"] = sum(round_up(s, ALIGNED_BYTES) for s in cuts if s >= LEAST_BYTES)
    return sizes
