"""Two training states compared: position, then tensor by tensor, in the memory of two of them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from zerotrain.position import MASTER
from zerotrain.state_source import Source, Weights, has_slot
from zerotrain.tensor_file import pairs

MADE_BY = ("engine", "phase", "run")
"""Fields of a position that say who made it: they are shown, and may differ in equal states."""


@dataclass(frozen=True)
class Difference:
    """How far two states are from each other."""

    lines: list[str]
    equal: bool
    """Equal in position (who made them aside) and, within the tolerance, in all tensors."""


def diff(a: Source | Weights, b: Source | Weights, *, tolerance: float = 0.0) -> Difference:
    """Compare two states, or weights with one: position, then tensor by tensor and slot by slot.

    Weights have neither position nor moments: they are compared with the master, or the average.

    Args:
        a: The first; its values are named first.
        b: The second.
        tolerance: Largest absolute difference that counts as equal.
    """
    lines: list[str] = []
    differing = 0
    slots = sorted({*a.slots, *b.slots}, key=lambda slot: (slot != MASTER, slot))
    names = dict.fromkeys([*a.shapes, *b.shapes])
    if a.position is None or b.position is None:
        slots = a.slots if a.position is None else b.slots
        # Weights hold what was not trained as well, which a state does not.
        trained = [side.shapes for side in (a, b) if side.position is not None]
        names = dict.fromkeys(trained[0] if trained else names)
    else:
        first, second = asdict(a.position), asdict(b.position)
        for key in [key for key in first if first[key] != second[key]]:
            differing += key not in MADE_BY
            lines += _field(key, first[key], second[key])
    same = close = 0
    for slot in slots:
        if lacking := _lacking(slot in a.slots, slot in b.slots):
            differing += 1
            lines.append(f"{slot}: {lacking}")
            continue
        for name in names:
            said = _lacking(name in a.shapes, name in b.shapes)
            if not said and a.shapes[name] != b.shapes[name]:
                said = f"shape {a.shapes[name]} / {b.shapes[name]}"
            if not said and not (has_slot(a, name, slot) and has_slot(b, name, slot)):
                continue
            if not said:
                absolute, relative = distance(a.tensor(name, slot), b.tensor(name, slot))
                same += absolute == 0
                close += 0 < absolute <= tolerance
                if absolute > tolerance:
                    said = f"differs by {absolute:.3g}, relative {relative:.3g}"
            if said:
                differing += 1
                lines.append(f"{name} ({slot}): {said}")
    within = f", {close} within {tolerance:g}" if tolerance else ""
    return Difference([*lines, f"{same} tensors equal{within}"], not differing)


def _lacking(in_first: bool, in_second: bool) -> str:
    return "" if in_first and in_second else f"not in the {'second' if in_first else 'first'}"


def _field(key: str, first: Any, second: Any) -> list[str]:
    """The differing entries of one field, one line each."""
    if isinstance(first, dict) and isinstance(second, dict):
        keys = sorted(k for k in {*first, *second} if first.get(k, ...) != second.get(k, ...))
        return [f"{key}.{k}: {first.get(k, 'absent')} / {second.get(k, 'absent')}" for k in keys]
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        both = enumerate(zip(first, second, strict=True))
        return [line for i, (x, y) in both if x != y for line in _field(f"{key}[{i}]", x, y)]
    return [f"{key}: {first} / {second}"]


def distance(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float]:
    """Largest absolute difference, and largest one relative to the larger of two elements.

    Both are infinite where one value is NaN, or infinite, and the other is not the same.
    """
    absolute = relative = 0.0
    for x, y in pairs(a, b, 2**20):  # the work is done on several copies in float64
        if x.dtype == y.dtype and torch.equal(x, y):
            continue
        x, y = x.double(), y.double()
        same = (x == y) | (x.isnan() & y.isnan())
        gap = (x - y).abs().masked_fill(same, 0).nan_to_num(nan=math.inf, posinf=math.inf)
        scale = torch.maximum(x.abs(), y.abs())
        share = (gap / scale).masked_fill(same, 0).nan_to_num(nan=math.inf, posinf=math.inf)
        absolute = max(absolute, float(gap.max()))
        relative = max(relative, float(share.max()))
    return absolute, relative
