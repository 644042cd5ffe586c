"""Host memory besides what the engines keep there: the load, the exact copy, locked pages."""

from __future__ import annotations

from collections.abc import Iterable

from zerotrain.plan.inputs import FP32, ParameterSizes, PlannedLaunch
from zerotrain.plan.parts import MemoryPart, Moment, since


def load_parts(launch: PlannedLaunch, model: ParameterSizes) -> list[MemoryPart]:
    """What loading the model takes until it is on the device in its type.

    safetensors maps files of float32: those pages belong to the cache, and the system takes them
    back when it needs them. Files of another type are converted (zerotrain/families).
    """
    if launch.init:
        most = max(model.parameters.values())
        return [
            MemoryPart(
                "parameter as it is read", launch.item * most, "host", (Moment.PLACE,),
                f"{launch.item} B an element of the largest (zerotrain/training/"
                "partitioned_model.py)",
            )
        ]  # fmt: skip
    mapped = model.stored_bytes == FP32
    parts = [
        MemoryPart(
            "model as it is loaded", 0 if mapped else FP32 * model.numel, "host",
            since(Moment.LOAD, Moment.PLACE),
            "mapped from files of float32, which takes no memory of its own"
            if mapped else "4 B a parameter: its files are of another type",
        )
    ]  # fmt: skip
    if launch.engine == "torch" or launch.item == FP32:
        return parts
    if launch.exact:
        parts.append(
            MemoryPart(
                "exact weights for the masters", FP32 * model.trained_numel, "host",
                since(Moment.PLACE, Moment.BUCKETS),
                "4 B a trained parameter: DeepSpeed would make its masters of rounded weights "
                "(zerotrain/training/zero_engine.py: _copies)",
            )
        )  # fmt: skip
    if not launch.cpu:
        parts.append(
            MemoryPart(
                "model as it is cast", launch.item * model.numel, "host", (Moment.PLACE,),
                "2 B a parameter: cast before it is moved (deepspeed/runtime/engine.py: "
                "_configure_distributed_model)",
            )
        )  # fmt: skip
    return parts


def save_parts(launch: PlannedLaunch, model: ParameterSizes) -> list[MemoryPart]:
    """What a checkpoint takes while it is written: one tensor, copied from the device."""
    if launch.cpu:
        return []
    return [
        MemoryPart(
            "tensor being written", FP32 * model.largest, "host", (Moment.SAVE,),
            "4 B an element of the largest parameter (zerotrain/checkpoint.py: write_rank)",
        )
    ]  # fmt: skip


def locked(sizes: Iterable[int]) -> int:
    """What locking pages for tensors of these sizes takes beyond their bytes.

    torch takes page-locked memory in powers of two (ATen/core/CachingHostAllocator.h: allocate).
    """
    return sum((1 << (size - 1).bit_length()) - size for size in sizes if size > 0)
