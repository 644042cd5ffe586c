"""A training state as a table: where it stands, what made it, what its tensors amount to."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from zerotrain.position import MASTER, TrainingPosition
from zerotrain.state_source import Source, Weights, has_slot
from zerotrain.tensor_file import chunks

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
"""What is shown of a position's `engine`, in this order."""


@dataclass
class Extent:
    """What a slot's values, or one tensor's, amount to; NaN shows in all of them."""

    squares: float = 0.0
    largest: float = -math.inf
    smallest: float = math.inf

    @property
    def norm(self) -> float:
        """Root of the sum of squares, summed in float64."""
        return math.sqrt(self.squares)

    def add(self, tensor: torch.Tensor) -> None:
        """Take in a tensor, chunk by chunk."""
        for part in chunks(tensor, torch.float64):
            low, high = part.aminmax()
            self.take(float(part.dot(part)), float(high), float(low))

    def take(self, squares: float, largest: float, smallest: float) -> None:
        """Take in what other values amount to."""
        self.squares += squares
        # The order matters: max and min keep a NaN that stands first.
        self.largest = largest if math.isnan(largest) else max(self.largest, largest)
        self.smallest = smallest if math.isnan(smallest) else min(self.smallest, smallest)


def show(source: Source | Weights, *, tensors: bool = False) -> Iterator[str]:
    """The lines of a table that describes a state, 80 columns wide.

    Args:
        source: What open_view gave.
        tensors: List each tensor, with its shape and the norm of each slot.
    """
    if isinstance(source, Weights):
        for key, value in source.artifact.content.items():
            yield _row(key, str(value))
    else:
        yield from _describe(source.position)
    total = sum(torch.Size(shape).numel() for shape in source.shapes.values())
    yield _row("parameters", f"{total:,} in {_tensors(source.shapes)}")
    for what in ("frozen", "tied"):
        if found := getattr(source, what, None):
            yield _row(what, _tensors(found))
    for sentence in getattr(source, "lost", ()):
        yield _row("left out", sentence)
    slots = sorted(source.slots, key=lambda slot: slot != MASTER)
    extents = {slot: Extent() for slot in slots}
    listed: list[str] = []
    for name, shape in source.shapes.items():
        norms = []
        for slot in slots:
            one = Extent()
            if not has_slot(source, name, slot):
                norms.append(one.norm)
                continue
            one.add(source.tensor(name, slot))
            extents[slot].take(one.squares, one.largest, one.smallest)
            norms.append(one.norm)
        if tensors:
            size = "x".join(map(str, shape)) or "scalar"
            listed += [name, f"  {size:22}" + "".join(f"{norm:>14.6g}" for norm in norms)]
    yield ""
    yield f"{'slot':24}{'norm':>14}{'largest':>14}{'smallest':>14}"
    for slot, extent in extents.items():
        numbers = (extent.norm, extent.largest, extent.smallest)
        yield f"{slot:24}" + "".join(f"{number:>14.6g}" for number in numbers)
    if tensors:
        yield ""
        yield f"{'tensor, shape; norm of':24}" + "".join(f"{slot[:13]:>14}" for slot in slots)
        yield from listed


def _describe(position: TrainingPosition) -> Iterator[str]:
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
        said = [_tensors(group.get("parameters", ()))]
        said += [f"{key} {_plain(value)}" for key, value in values.items()]
        yield _row(f"group {number}", ", ".join(said))
    if position.lr_scheduler:
        schedule = f"{position.lr_scheduler} over {position.lr_scheduler_steps:,} steps"
        yield _row("learning rate", schedule)
    if position.loss_scale:
        yield _row("loss scale", f"{position.loss_scale['scale']:g}")


def _tensors(names: Collection[str]) -> str:
    return f"{len(names):,} tensor{'s' * (len(names) != 1)}"


def _plain(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "(" + ", ".join(map(_plain, value)) + ")"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _row(label: str, text: str) -> str:
    """A label and its text, whose further lines stand below its first."""
    first, further = f"{label:24}", " " * 24
    return textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=further)
