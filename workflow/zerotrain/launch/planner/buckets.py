"""ZeRO's division of parameters: buckets of gradients, partitions, sub-groups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate


def round_up(numel: int, multiple: int) -> int:
    """Return the number rounded up to a multiple."""
    return -(-numel // multiple) * multiple


def largest_fill(sizes: Iterable[int], bucket: int) -> int:
    """Return the most elements that a bucket holds if it is filled in this order.

    It is emptied before a parameter that does not fit; one that is larger than the bucket never
    enters it.
    """
    most = held = 0
    for size in sizes:
        if size > bucket:
            held = 0
            continue
        held = size if held + size > bucket else held + size
        most = max(most, held)
    return most


def flat_sizes(groups: Sequence[Sequence[int]], processes: int) -> list[int]:
    """Return the elements of each group's flat tensor at stages 1 and 2, padded to divide evenly.

    Source: deepspeed/runtime/zero/stage_1_and_2.py, DeepSpeedZeroOptimizer.__init__ (alignment).
    """
    return [round_up(sum(group), 2 * processes) for group in groups]


def gradients_of_partition(groups: Sequence[Sequence[int]], processes: int) -> int:
    """Return the elements of parameters that are at least partly in a process's partition.

    The result is that of the process with the most elements; the gradients of these parameters are
    kept whole.

    Source: deepspeed/runtime/zero/stage_1_and_2.py, copy_grads_in_partition.
    """
    held = [0] * processes
    for group, flat in zip(groups, flat_sizes(groups, processes), strict=True):
        part = flat // processes
        for end, size in zip(accumulate(group), group, strict=True):
            for rank in range((end - size) // part, (end - 1) // part + 1):
                held[rank] += size
    return max(held)


def partitioned_numel(sizes: Iterable[int], processes: int) -> int:
    """Return a process's elements of parameters that are partitioned one by one, at stage 3.

    Source: deepspeed/runtime/zero/partition_parameters.py, Init._aligned_size.
    """
    return sum(-(-size // processes) for size in sizes)


def sub_groups(groups: Sequence[Sequence[int]], processes: int, size: int) -> list[int]:
    """Return a process's elements of each sub-group; stage 3 updates the sub-groups one by one.

    Source: deepspeed/runtime/zero/stage3.py, _create_fp16_sub_groups.
    """
    sizes_of_groups: list[int] = []
    for group in groups:
        parts = [-(-numel // processes) for numel in group]
        if size >= sum(parts):
            sizes_of_groups.append(sum(parts))
            continue
        held = 0
        for part in parts:
            held += part
            if held >= size:
                sizes_of_groups.append(held)
                held = 0
        if held:
            sizes_of_groups.append(held)
    return sizes_of_groups
