"""Parts of a machine's memory: what lies where, from which moment of a training to which."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

Place = Literal["device", "host"]


class Moment(StrEnum):
    """Moments of a training, in their order; between two of them memory is taken or given back."""

    LOAD = "load the model"
    PLACE = "place and cast it"
    FLATTEN = "flatten the weights"
    MASTERS = "copy the masters"
    BUFFERS = "make the buffers"
    BUCKETS = "make the buckets"
    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCE = "reduce a bucket"
    CLIP = "take the norm"
    STEP = "optimizer step"
    GATHER = "gather the new weights"
    SAVE = "save"


ALWAYS = tuple(Moment)
TRAINING = ALWAYS[ALWAYS.index(Moment.FORWARD) :]
"""From the first step on."""


def since(first: Moment, last: Moment = Moment.SAVE) -> tuple[Moment, ...]:
    """The moments from one to another, both included."""
    return ALWAYS[ALWAYS.index(first) : ALWAYS.index(last) + 1]


@dataclass(frozen=True)
class MemoryPart:
    """A part of one process's memory.

    Attributes:
        name: What it is.
        bytes: Its size.
        where: On the device, or in host memory.
        when: The moments at which it is there.
        why: Its arithmetic, and the code that takes it.
        state: Whether it is a model state: what ZeRO's arithmetic counts (weights, gradients,
            masters, moments), and not a buffer or a copy.
        touched: Bytes of it that are ever written to. A CPU's memory is taken when it is first
            written to; a device's, and page-locked memory, at once.
    """

    name: str
    bytes: int
    where: Place
    when: tuple[Moment, ...]
    why: str
    state: bool = False
    touched: int | None = None

    @property
    def resident(self) -> int:
        """Its bytes in memory that is taken when it is written to."""
        return self.bytes if self.touched is None else self.touched


def at(parts: Iterable[MemoryPart], moment: Moment, where: Place) -> int:
    """Bytes of a place that are taken at a moment."""
    return sum(part.bytes for part in parts if part.where == where and moment in part.when)


def peak(parts: Iterable[MemoryPart], where: Place) -> tuple[int, Moment]:
    """The most bytes of a place that are taken at one moment, and the first such moment."""
    parts = list(parts)
    return max(
        ((at(parts, moment, where), moment) for moment in Moment), key=lambda found: found[0]
    )


def resident_peak(parts: Iterable[MemoryPart]) -> tuple[int, Moment]:
    """The most bytes at one moment where device and host are one memory, a CPU's."""
    parts = list(parts)
    sums = [(sum(p.resident for p in parts if moment in p.when), moment) for moment in Moment]
    return max(sums, key=lambda sum_: sum_[0])


def states(parts: Iterable[MemoryPart], where: Place) -> int:
    """Bytes of the model states of a place."""
    return sum(part.bytes for part in parts if part.state and part.where == where)
