"""The lowest preset that fits: each keeps more elsewhere, and is slower, than the one before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zerotrain.machine.host import gib
from zerotrain.plan.prediction import Prediction

RESERVE = 2**30
"""Bytes of a device left free: its driver's context, workspaces of its libraries and fragments of
its allocator, none of which has a formula."""


@dataclass(frozen=True)
class Choice:
    """What was chosen, and why nothing before it."""

    chosen: Prediction | None
    reasons: tuple[str, ...]

    @property
    def why(self) -> str:
        """The reasons in one line."""
        return "; ".join(self.reasons)


def choose(
    predictions: Sequence[Prediction],
    device_memory: int,
    host_memory: int | None,
    *,
    has_disk: bool = False,
) -> Choice:
    """Choose the first that fits.

    Args:
        predictions: In order, the lowest first.
        device_memory: Bytes of one device; on a CPU those of the machine.
        host_memory: Bytes of the machine's memory; None where it is not known.
        has_disk: Whether launch.offload_path names a disk; without, nothing is swapped to one.
    """
    reasons: list[str] = []
    for one in predictions:
        reason = _refusal(one, device_memory, host_memory, has_disk)
        if reason is None:
            fitting = f"{one.preset} takes {gib(one.device)} of {gib(device_memory)}"
            return Choice(one, (fitting, *reasons))
        reasons.append(reason)
    return Choice(None, tuple(reasons))


def fits(one: Prediction, device_memory: int, host_memory: int | None) -> bool:
    """Whether device and host have what it takes."""
    return (
        one.device + (0 if one.launch.cpu else RESERVE) <= device_memory
        and (host_memory is None or one.host <= host_memory)
    )  # fmt: skip


def _refusal(
    one: Prediction, device_memory: int, host_memory: int | None, has_disk: bool
) -> str | None:
    if one.useless:
        return f"{one.preset} saves nothing on one process"
    if one.swap and not has_disk:
        return f"{one.preset} needs launch.offload_path"
    if not fits(one, device_memory, None):
        return f"{one.preset} needs {gib(one.device)} and {gib(RESERVE)} of reserve"
    if not fits(one, device_memory, host_memory):
        return f"{one.preset} needs {gib(one.host)} of host memory, of {gib(host_memory or 0)}"
    return None
