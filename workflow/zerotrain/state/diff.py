"""Comparison of two training states: position, then tensor by tensor, with two in memory."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from zerotrain.artifact.recipe import setting_differences
from zerotrain.artifact.tensor_file import pairs
from zerotrain.state.open import Weights, has_slot
from zerotrain.state.position import MASTER, Source
from zerotrain.state.ran_on import RanOn

MADE_BY = ("engine", "phase", "run", "ran_on", "history")
"""Fields of a position that describe its origin: they are shown, and may differ in equal states."""


@dataclass(frozen=True)
class Difference:
    """The differences between two states."""

    lines: list[str]
    equal: bool
    """Whether positions (except their origin) and, within the tolerance, all tensors are equal."""


def diff(a: Source | Weights, b: Source | Weights, *, tolerance: float = 0.0) -> Difference:
    """Compare two states, or weights with a state: position, then each slot of each tensor.

    Weights have neither position nor moments: they are compared with the master weights, or the
    EMA.

    Args:
        a: The first state; its values are printed first.
        b: The second state.
        tolerance: Largest absolute difference that counts as equal.
    """
    lines: list[str] = []
    differing = 0
    slots = sorted({*a.slots, *b.slots}, key=lambda slot: (slot != MASTER, slot))
    names = dict.fromkeys([*a.shapes, *b.shapes])
    if a.position is None or b.position is None:
        slots = a.slots if a.position is None else b.slots
        # Weights also have untrained tensors, which a state has not.
        trained = [side.shapes for side in (a, b) if side.position is not None]
        names = dict.fromkeys(trained[0] if trained else names)
    else:
        first, second = asdict(a.position), asdict(b.position)
        for key in [key for key in first if first[key] != second[key]]:
            differing += key not in MADE_BY
            if key != "history":
                lines += _field(key, first[key], second[key])
        lines += _history(RanOn.of(a.position), RanOn.of(b.position))
    same = close = 0
    for slot in slots:
        if lacking := _describe_missing(slot in a.slots, slot in b.slots):
            differing += 1
            lines.append(f"{slot}: {lacking}")
            continue
        for name in names:
            text = _describe_missing(name in a.shapes, name in b.shapes)
            if not text and a.shapes[name] != b.shapes[name]:
                text = f"shape {a.shapes[name]} / {b.shapes[name]}"
            if not text and not (has_slot(a, name, slot) and has_slot(b, name, slot)):
                continue
            if not text:
                absolute, relative = distance(a.tensor(name, slot), b.tensor(name, slot))
                same += absolute == 0
                close += 0 < absolute <= tolerance
                if absolute > tolerance:
                    text = f"differs by {absolute:.3g}, relative {relative:.3g}"
            if text:
                differing += 1
                lines.append(f"{name} ({slot}): {text}")
    within = f", {close} within {tolerance:g}" if tolerance else ""
    return Difference([*lines, f"{same} tensors equal{within}"], not differing)


def _describe_missing(in_first: bool, in_second: bool) -> str:
    return "" if in_first and in_second else f"not in the {'second' if in_first else 'first'}"


def _history(first: RanOn, second: RanOn) -> list[str]:
    """Return the changes in the history of only one of two trainings."""
    own = [f"history: {c.text} / absent" for c in first.changes if c not in second.changes]
    return own + [f"history: absent / {c.text}" for c in second.changes if c not in first.changes]


def _field(key: str, first: Any, second: Any) -> list[str]:
    """Return the differing entries of one field, one per line."""
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        both = enumerate(zip(first, second, strict=True))
        return [line for i, (x, y) in both for line in _field(f"{key}[{i}]", x, y)]
    found = setting_differences({key: first}, {key: second}, missing="absent")
    return sorted(f"{one.key}: {one.old} / {one.new}" for one in found)


def distance(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float]:
    """Compute the largest absolute difference, and the largest relative to the larger element.

    Both are infinite if one value is NaN or infinite and the other is not the same.
    """
    absolute = relative = 0.0
    for x, y in pairs(a, b, 2**20):  # the computation needs several float64 copies
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
