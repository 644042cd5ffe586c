"""ZeRO's division of parameters: buckets of gradients, partitions, sub-groups, whole parameters."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
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


@dataclass(frozen=True)
class Live:
    """Peak elements of whole parameters, and of the buffers in which they are gathered.

    Attributes:
        forward: The peak of a forward pass.
        backward: The peak of a backward pass.
        reducing: The peak over the moments of a backward pass at which a gradient bucket is full.
    """

    forward: int
    backward: int
    reducing: int


@dataclass(frozen=True)
class Coordinator:
    """Settings of stage 3's gathering.

    Attributes:
        prefetch: stage3_prefetch_bucket_size.
        max_live: stage3_max_live_parameters.
        reuse: stage3_max_reuse_distance.
        kept: stage3_param_persistence_threshold: smaller parameters stay gathered, and are not
            counted.
        bucket: reduce_bucket_size.
        gathers: Whether there are several processes. The parameters of one gather are in one
            buffer, from which all are copied at the first use of one, and which stays until each
            has been used (partition_parameters.py: AllGatherCoalescedHandle).
        copies: Whether a gather in progress has another copy: gloo, the backend of CPU processes,
            makes one (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp: AsyncAllgatherWork). Its
            second thread may fill another copy at the same time; its size depends on the machine's
            timing and is not counted.
    """

    prefetch: int
    max_live: int
    reuse: int
    kept: int
    bucket: int
    gathers: bool
    copies: bool = False


@cache
def live_parameters(modules: tuple[tuple[int, ...], ...], by: Coordinator) -> Live:
    """Simulate the coordinator over a forward and a backward pass.

    DeepSpeed fetches a module's parameters before its forward and its backward pass, prefetches
    those of the next modules, and releases them unless they are used again soon. The modules are
    assumed to run in the order of their names in the model, and backwards in the opposite order.

    Source: PartitionedParameterCoordinator (deepspeed/runtime/zero/
    partitioned_param_coordinator.py).

    Args:
        modules: Elements of the parameters of each module with parameters.
        by: The coordinator's settings.
    """
    count = len(modules)
    order = [*range(count), *reversed(range(count))]
    sizes = [[size for size in module if size > by.kept] for module in modules]
    passed = [0, *accumulate(sum(modules[number]) for number in order)]
    queue = deque(
        (step, number, size)
        for step, number in enumerate(order)
        for size in enumerate(sizes[number])
    )
    running = _Memory(by)
    fetched_for: dict[int, int] = {}
    most = [0, 0]
    waiting = reducing = 0
    for step, number in enumerate(order):
        own = {(number, index): size for index, size in enumerate(sizes[number])}
        running.fetch(own)
        while queue and queue[0][0] <= step:
            queue.popleft()
        room = min(by.max_live - running.held, by.prefetch)
        ahead: Parameters = {}
        while queue and room > 0:
            later, next_number, (index, size) = queue.popleft()
            fetched_for[next_number] = max(later, fetched_for.get(next_number, later))
            if (next_number, index) not in running.available:
                ahead[next_number, index] = size
                room -= size
        running.begin(ahead)
        most[step >= count] = max(most[step >= count], running.take_most())
        if step >= count:
            waiting += sum(modules[number])
            if waiting > by.bucket:
                reducing, waiting = max(reducing, running.now()), sum(modules[number])
        again = 2 * count - 1 - step if step < count else None
        soon = again is not None and passed[again] - passed[step + 1] < by.reuse
        if not soon and fetched_for.get(number, step) <= step:
            running.release(own)
    return Live(most[0], most[1], reducing)


Parameters = dict[tuple[int, int], int]
"""Elements, by module and index in it."""


@dataclass
class _Gathering:
    """Parameters that are gathered together, in one buffer."""

    parameters: Parameters
    unused: set[tuple[int, int]]
    waited: bool = False

    @property
    def numel(self) -> int:
        return sum(self.parameters.values())


class _Memory:
    """Whole parameters, and the buffers in which they are gathered."""

    def __init__(self, by: Coordinator) -> None:
        self._by = by
        self.available: set[tuple[int, int]] = set()
        """Parameters that are whole or being gathered."""
        self.held = 0
        """Elements of the available parameters."""
        self._gatherings: list[_Gathering] = []
        self._most = 0

    def begin(self, parameters: Parameters) -> None:
        """Start to gather parameters."""
        if not parameters:
            return
        self.available |= parameters.keys()
        self.held += sum(parameters.values())
        if self._by.gathers:
            self._gatherings.append(_Gathering(parameters, set(parameters)))
        on_their_way = [one.numel for one in self._gatherings if not one.waited]
        self._note(copy=max(on_their_way, default=0) if self._by.copies else 0)

    def fetch(self, parameters: Parameters) -> None:
        """Wait for parameters that are used now."""
        self.begin({key: n for key, n in parameters.items() if key not in self.available})
        for gathering in [one for one in self._gatherings if one.unused & parameters.keys()]:
            gathering.waited = True
            self._note()
            gathering.unused -= parameters.keys()
            if not gathering.unused:
                self._gatherings.remove(gathering)

    def release(self, parameters: Parameters) -> None:
        """Release parameters."""
        self.held -= sum(n for key, n in parameters.items() if key in self.available)
        self.available -= parameters.keys()

    def now(self) -> int:
        """Return the elements of both; parameters of a gather in progress are only its buffer."""
        return self.held + sum(one.numel for one in self._gatherings if one.waited)

    def take_most(self) -> int:
        """Return the peak elements since the last call."""
        most, self._most = self._most, self.now()
        return most

    def _note(self, copy: int = 0) -> None:
        self._most = max(self._most, self.now() + copy)
