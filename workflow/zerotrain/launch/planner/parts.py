"""Parts of a machine's memory: their place, and the moments of a training at which they exist."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

Place = Literal["device", "host"]


class Moment(StrEnum):
    """Moments of a training, in order; between two of them memory is allocated or freed."""

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
"""Moments from the first step on."""


def since(first: Moment, last: Moment = Moment.SAVE) -> tuple[Moment, ...]:
    """Return the moments from one to another, both included."""
    return ALWAYS[ALWAYS.index(first) : ALWAYS.index(last) + 1]


@dataclass(frozen=True)
class MemoryPart:
    """Part of one process's memory.

    Attributes:
        name: Name of the part.
        bytes: Its size in bytes.
        where: On the device, or in host memory.
        when: The moments at which it exists.
        why: Its arithmetic, and the code that allocates it.
        state: Whether it is a model state that ZeRO's arithmetic counts (weights, gradients,
            masters, moments), not a buffer or a copy.
        touched: Bytes of it that are ever written. CPU memory is only used once it is written;
            device and page-locked memory is used at once.
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
        """Bytes that count in CPU memory, which is only used once it is written."""
        return self.bytes if self.touched is None else self.touched


def at(parts: Iterable[MemoryPart], moment: Moment, where: Place) -> int:
    """Return the bytes of a place that are in use at a moment."""
    return sum(part.bytes for part in parts if part.where == where and moment in part.when)


def peak(parts: Iterable[MemoryPart], where: Place) -> tuple[int, Moment]:
    """Return the peak bytes of a place, and the first moment with that peak."""
    parts = list(parts)
    return max(
        ((at(parts, moment, where), moment) for moment in Moment), key=lambda entry: entry[0]
    )


def resident_peak(parts: Iterable[MemoryPart]) -> tuple[int, Moment]:
    """Return the peak bytes and its moment if device and host share one memory, as on a CPU."""
    parts = list(parts)
    sums = [(sum(p.resident for p in parts if moment in p.when), moment) for moment in Moment]
    return max(sums, key=lambda sum_: sum_[0])


def states(parts: Iterable[MemoryPart], where: Place) -> int:
    """Return the bytes of the model states in a place."""
    return sum(part.bytes for part in parts if part.state and part.where == where)
