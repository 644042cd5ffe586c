"""The whole parameters that stage 3 has gathered at a time.

DeepSpeed fetches a module's parameters before its forward and its backward pass, those of the next
modules ahead of it, and gives them back unless they are used again soon. The modules are taken to
run in the order in which the model names them, and backwards in the opposite one.

Source: deepspeed/runtime/zero/partitioned_param_coordinator.py, PartitionedParameterCoordinator.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Live:
    """Elements of whole parameters.

    Attributes:
        forward: The most that is there during a forward pass, and
        backward: during a backward pass, and
        reducing: at those of its moments at which a bucket of gradients is full.
        gathered_forward: The most that is gathered at once in a forward pass, and
        gathered_backward: in a backward pass; it lies in one buffer first, and is copied out of it.
    """

    forward: int
    backward: int
    reducing: int
    gathered_forward: int
    gathered_backward: int


def live_parameters(
    modules: Sequence[Sequence[int]],
    *,
    prefetch: int,
    max_live: int,
    reuse: int,
    kept: int,
    bucket: int,
) -> Live:
    """Run the coordinator over a forward and a backward pass.

    Args:
        modules: Elements of the parameters of each module that has some.
        prefetch: stage3_prefetch_bucket_size.
        max_live: stage3_max_live_parameters.
        reuse: stage3_max_reuse_distance.
        kept: stage3_param_persistence_threshold: smaller parameters stay, and are not counted.
        bucket: reduce_bucket_size.
    """
    count = len(modules)
    order = [*range(count), *reversed(range(count))]
    sizes = [[size for size in module if size > kept] for module in modules]
    passed = [0, *accumulate(sum(modules[number]) for number in order)]
    queue = deque((step, number) for step, number in enumerate(order))
    available: set[int] = set()
    fetched_for: dict[int, int] = {}
    most, gathered = [0, 0], [0, 0]
    held = waiting = reducing = 0
    for step, number in enumerate(order):
        backward = int(step >= count)
        if number not in available:
            available.add(number)
            held += sum(sizes[number])
            gathered[backward] = max(gathered[backward], sum(sizes[number]))
        while queue and queue[0][0] <= step:
            queue.popleft()
        room, ahead = min(max_live - held, prefetch), 0
        while queue and ahead < room:
            later, next_number = queue.popleft()
            fetched_for[next_number] = max(later, fetched_for.get(next_number, later))
            if next_number not in available:
                available.add(next_number)
                ahead += sum(sizes[next_number])
        held += ahead
        most[backward] = max(most[backward], held)
        gathered[backward] = max(gathered[backward], ahead)
        if backward:
            waiting += sum(modules[number])
            if waiting > bucket:
                reducing, waiting = max(reducing, held), sum(modules[number])
        again = 2 * count - 1 - step if step < count else None
        soon = again is not None and passed[again] - passed[step + 1] < reuse
        if not soon and fetched_for.get(number, step) <= step:
            available.discard(number)
            held -= sum(sizes[number])
    return Live(most[0], most[1], reducing, gathered[0], gathered[1])
