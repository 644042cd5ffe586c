"""A training state as a table: its position, its origin, and a summary of its tensors."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from zerotrain.artifact.tensor_file import chunks
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
