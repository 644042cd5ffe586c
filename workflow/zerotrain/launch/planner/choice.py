"""The lowest preset that fits: each one offloads more, and is slower, than the one before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zerotrain.launch.planner.prediction import Prediction
from zerotrain.machine.host import gib

RESERVE = 2**30
"""Bytes of a device that are left free for the driver's context, library workspaces and allocator
fragmentation, none of which has a formula."""


@dataclass(frozen=True)
class Choice:
    """Chosen preset, and why none before it."""

    chosen: Prediction | None
    reasons: tuple[str, ...]

    @property
    def why(self) -> str:
        """Reasons in one line."""
        return "; ".join(self.reasons)


def choose(
    predictions: Sequence[Prediction],
    device_memory: int,
    host_memory: int | None,
    *,
    has_disk: bool = False,
) -> Choice:
    """Choose the first prediction that fits.

    Args:
        predictions: Predictions in order, the lowest preset first.
        device_memory: Bytes of one device; on a CPU the machine's memory.
        host_memory: Bytes of the machine's memory; None if unknown.
        has_disk: Whether launch.offload_path names a disk, which presets that swap need.
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
    """Return whether a prediction fits into device and host memory."""
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
