"""How ZeRO cuts parameters up: buckets of gradients, partitions, sub-groups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate


def padded(numel: int, multiple: int) -> int:
    """The next multiple."""
    return -(-numel // multiple) * multiple


def fullest(sizes: Iterable[int], bucket: int) -> int:
    """The most elements that a bucket ever holds, filled in this order and emptied before one that
    does not fit; what is larger than the bucket never enters it."""
    most = held = 0
    for size in sizes:
        if size > bucket:
            held = 0
            continue
        held = size if held + size > bucket else held + size
        most = max(most, held)
    return most


def flat_sizes(groups: Sequence[Sequence[int]], processes: int) -> list[int]:
    """Elements of each group's flat tensor at stages 1 and 2, padded to be shared evenly.

    Source: deepspeed/runtime/zero/stage_1_and_2.py, DeepSpeedZeroOptimizer.__init__ (alignment).
    """
    return [padded(sum(group), 2 * processes) for group in groups]


def gradients_of_partition(groups: Sequence[Sequence[int]], processes: int) -> int:
    """Elements of the whole parameters that lie in a process's partition, at least in part; of the
    process that has most. Their gradients are kept whole.

    Source: deepspeed/runtime/zero/stage_1_and_2.py, copy_grads_in_partition.
    """
    held = [0] * processes
    for group, flat in zip(groups, flat_sizes(groups, processes), strict=True):
        part = flat // processes
        for end, size in zip(accumulate(group), group, strict=True):
            for rank in range((end - size) // part, (end - 1) // part + 1):
                held[rank] += size
    return max(held)


def partitioned(sizes: Iterable[int], processes: int) -> int:
    """Elements that a process holds of parameters that are cut one by one, at stage 3.

    Source: deepspeed/runtime/zero/partition_parameters.py, Init._aligned_size.
    """
    return sum(-(-size // processes) for size in sizes)


def sub_groups(groups: Sequence[Sequence[int]], processes: int, size: int) -> list[int]:
    """Elements that a process holds of each sub-group, which stage 3 updates one after the other.

    Source: deepspeed/runtime/zero/stage3.py, _create_fp16_sub_groups.
    """
    found: list[int] = []
    for group in groups:
        parts = [-(-numel // processes) for numel in group]
        if size >= sum(parts):
            found.append(sum(parts))
            continue
        held = 0
        for part in parts:
            held += part
            if held >= size:
                found.append(held)
                held = 0
        if held:
            found.append(held)
    return found
