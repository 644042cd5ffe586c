"""The whole parameters that stage 3 has gathered at a time.

DeepSpeed fetches a module's parameters before its forward and its backward pass, those of the next
modules ahead of it, and gives them back unless they are used again soon. The modules are taken to
run in the order in which the model names them, and backwards in the opposite one.

Source: deepspeed/runtime/zero/partitioned_param_coordinator.py, PartitionedParameterCoordinator.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import cache
from itertools import accumulate


@dataclass(frozen=True)
class Live:
    """Elements of whole parameters, and of the buffers that they are gathered in.

    Attributes:
        forward: The most that is there during a forward pass, and
        backward: during a backward pass, and
        reducing: at those of its moments at which a bucket of gradients is full.
    """

    forward: int
    backward: int
    reducing: int


@dataclass(frozen=True)
class Coordinator:
    """What stage 3 goes by.

    Attributes:
        prefetch: stage3_prefetch_bucket_size.
        max_live: stage3_max_live_parameters.
        reuse: stage3_max_reuse_distance.
        kept: stage3_param_persistence_threshold: smaller parameters stay, and are not counted.
        bucket: reduce_bucket_size.
        gathers: Whether there are several processes. The parameters of one gathering lie in one
            buffer, out of which all are copied when the first of them is used, and which stays
            until the last of them is (partition_parameters.py: AllGatherCoalescedHandle).
        copies: Whether a gathering is copied once more while it goes on: gloo does that, which a
            CPU's processes talk through (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp:
            AsyncAllgatherWork). Its second thread may fill another copy meanwhile; how full that
            one is when the first is depends on the machine's timing, and it is left out.
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
    """Run the coordinator over a forward and a backward pass.

    Args:
        modules: Elements of the parameters of each module that has some.
        by: What it goes by.
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
"""Elements, by module and number in it."""


@dataclass
class _Gathering:
    """Parameters that are gathered at once, in one buffer."""

    parameters: Parameters
    unused: set[tuple[int, int]]
    waited: bool = False

    @property
    def numel(self) -> int:
        return sum(self.parameters.values())


class _Memory:
    """Whole parameters, and the buffers that they are gathered in."""

    def __init__(self, by: Coordinator) -> None:
        self._by = by
        self.available: set[tuple[int, int]] = set()
        """Whole, or on their way."""
        self.held = 0
        """Their elements."""
        self._gatherings: list[_Gathering] = []
        self._most = 0

    def begin(self, parameters: Parameters) -> None:
        """Gather parameters."""
        if not parameters:
            return
        self.available |= parameters.keys()
        self.held += sum(parameters.values())
        if self._by.gathers:
            self._gatherings.append(_Gathering(parameters, set(parameters)))
        on_their_way = [one.numel for one in self._gatherings if not one.waited]
        self._note(copy=max(on_their_way, default=0) if self._by.copies else 0)

    def fetch(self, parameters: Parameters) -> None:
        """Have parameters that are used now."""
        self.begin({key: n for key, n in parameters.items() if key not in self.available})
        for gathering in [one for one in self._gatherings if one.unused & parameters.keys()]:
            gathering.waited = True
            self._note()
            gathering.unused -= parameters.keys()
            if not gathering.unused:
                self._gatherings.remove(gathering)

    def release(self, parameters: Parameters) -> None:
        """Give parameters back."""
        self.held -= sum(n for key, n in parameters.items() if key in self.available)
        self.available -= parameters.keys()

    def now(self) -> int:
        """Elements of both; the parameters of a gathering that goes on are its buffer alone."""
        return self.held + sum(one.numel for one in self._gatherings if one.waited)

    def take_most(self) -> int:
        """The most elements since the last call."""
        found, self._most = self._most, self.now()
        return found

    def _note(self, copy: int = 0) -> None:
        self._most = max(self._most, self.now() + copy)
