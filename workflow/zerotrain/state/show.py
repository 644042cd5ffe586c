"""Training states for people: one as a table of position, origin and tensors; two compared."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from zerotrain.artifact.recipe import setting_differences
from zerotrain.artifact.tensor_file import chunks, pairs
from zerotrain.state.open import Weights, has_slot
from zerotrain.state.position import MASTER, Source, TrainerState
from zerotrain.state.ran_on import RanOn

WIDTH = 80
LABELS = {
    "preset": "preset",
    "engine": "engine",
    "zero_stage": "ZeRO stage",
    "offload_optimizer": "offload of optimizer",
    "offload_param": "offload of parameters",
    "world_size": "world size",
    "mixed_precision": "mixed precision",
    "global_batch_size": "global batch size",
    "gradient_accumulation_steps": "accumulation steps",
}
"""The shown keys of a position's `engine`, in this order."""


@dataclass
class TensorSummary:
    """Norm and extremes of a slot's or one tensor's values; a NaN shows in all of them."""

    squares: float = 0.0
    largest: float = -math.inf
    smallest: float = math.inf

    @property
    def norm(self) -> float:
        """Return the root of the sum of squares, summed in float64."""
        return math.sqrt(self.squares)

    def add(self, tensor: torch.Tensor) -> None:
        """Add a tensor, chunk by chunk."""
        for part in chunks(tensor, torch.float64):
            low, high = part.aminmax()
            self.take(float(part.dot(part)), float(high), float(low))

    def take(self, squares: float, largest: float, smallest: float) -> None:
        """Add the sums and extremes of other values."""
        self.squares += squares
        # The order matters: max and min return a NaN only if it comes first.
        self.largest = largest if math.isnan(largest) else max(self.largest, largest)
        self.smallest = smallest if math.isnan(smallest) else min(self.smallest, smallest)


def show(source: Source | Weights, *, tensors: bool = False) -> Iterator[str]:
    """Yield the lines of a table that describes a state, 80 columns wide.

    Args:
        source: The result of open_view.
        tensors: Whether to list each tensor, with its shape and the norm of each slot.
    """
    if isinstance(source, Weights):
        for key, value in source.artifact.content.items():
            yield _row(key, str(value))
    else:
        yield from _describe(source.position)
    total = sum(torch.Size(shape).numel() for shape in source.shapes.values())
    yield _row("parameters", f"{total:,} in {_tensors(source.shapes)}")
    for what in ("frozen", "tied"):
        if names := getattr(source, what, None):
            yield _row(what, _tensors(names))
    if recorded := getattr(source, "progress", ""):
        yield _row("recorded", recorded)
    for sentence in getattr(source, "lost", ()):
        yield _row("left out", sentence)
    slots = sorted(source.slots, key=lambda slot: slot != MASTER)
    summaries = {slot: TensorSummary() for slot in slots}
    listed: list[str] = []
    for name, shape in source.shapes.items():
        norms = []
        for slot in slots:
            one = TensorSummary()
            if not has_slot(source, name, slot):
                norms.append(one.norm)
                continue
            one.add(source.tensor(name, slot))
            summaries[slot].take(one.squares, one.largest, one.smallest)
            norms.append(one.norm)
        if tensors:
            size = "x".join(map(str, shape)) or "scalar"
            listed += [name, f"  {size:22}" + "".join(f"{norm:>14.6g}" for norm in norms)]
    yield ""
    yield f"{'slot':24}{'norm':>14}{'largest':>14}{'smallest':>14}"
    for slot, summary in summaries.items():
        numbers = (summary.norm, summary.largest, summary.smallest)
        yield f"{slot:24}" + "".join(f"{number:>14.6g}" for number in numbers)
    if tensors:
        yield ""
        yield f"{'tensor, shape; norm of':24}" + "".join(f"{slot[:13]:>14}" for slot in slots)
        yield from listed


def _describe(position: TrainerState) -> Iterator[str]:
    name = f"{position.run}/{position.phase}".strip("/")
    yield _row("run/phase", name or "not of zerotrain")
    yield _row("step", f"{position.step:,}")
    yield _row("samples", f"{position.samples:,}")
    engine = position.engine
    for key, label in LABELS.items():
        if engine.get(key) not in (None, ""):
            yield _row(label, str(engine[key]))
    yield _row("optimizer", f"{position.optimizer or 'unknown'}, step {position.optimizer_step:,}")
    for number, group in enumerate(position.param_groups):
        values = {key: value for key, value in group.items() if key != "parameters"}
        fields = [_tensors(group.get("parameters", ()))]
        fields += [f"{key} {_plain(value)}" for key, value in values.items()]
        yield _row(f"group {number}", ", ".join(fields))
    if position.lr_scheduler:
        schedule = f"{position.lr_scheduler} over {position.lr_scheduler_steps:,} steps"
        yield _row("learning rate", schedule)
    if position.loss_scale:
        yield _row("loss scale", f"{position.loss_scale['scale']:g}")
    ran_on = RanOn.of(position)
    for label, text in ran_on.rows():
        yield _row(label, text)
    if ran_on.values:
        yield _row("exact", ran_on.exact)
    for change in ran_on.changes:
        yield _row("changed", change.text)


def _tensors(names: Collection[str]) -> str:
    return f"{len(names):,} tensor{'s' * (len(names) != 1)}"


def _plain(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "(" + ", ".join(map(_plain, value)) + ")"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _row(label: str, text: str) -> str:
    """Format a label and its text, with further lines aligned below the first."""
    first, further = f"{label:24}", " " * 24
    return textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=further)


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
