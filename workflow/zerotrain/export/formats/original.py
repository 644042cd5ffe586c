"""A denoiser's tensors in its original layout: the slot of each, and joined tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from zerotrain.export.formats import sdxl_names
from zerotrain.export.formats.mmdit_names import TensorSlot, flux_slot, sd3_slots
from zerotrain.export.formats.tensors import LazyTensor
from zerotrain.export.formats.weights import ExportedWeights

Slots = Callable[[str], TensorSlot]
"""Returns the slot of a tensor by its name in diffusers."""


def _sdxl(config: Mapping[str, Any]) -> Slots:
    name_of = sdxl_names.unet_names(config)
    return lambda name: TensorSlot(name_of(name))


SLOTS: Mapping[str, Callable[[Mapping[str, Any]], Slots]] = {
    "sdxl": _sdxl,
    "sd3": sd3_slots,
    "flux": lambda config: flux_slot,
    # diffusers uses the original's names.
    "qwen_image": lambda config: TensorSlot,
}
"""Families with known original names: functions that return them for a denoiser's config.json."""
FLUX_WIDTH = 3072
"""Width at which diffusers splits Flux's joined tensors, whatever the model's."""


def to_original_layout(tensors: Mapping[str, LazyTensor], slot_of: Slots) -> dict[str, LazyTensor]:
    """Return a denoiser's tensors under their original names, without a prefix."""
    joined: dict[str, dict[int, LazyTensor]] = {}
    for name, stored in tensors.items():
        slot = slot_of(name)
        parts = joined.setdefault(slot.name, {})
        parts[slot.part] = swap_halves(stored) if slot.swapped else stored
    return {
        name: rows_of([parts[number] for number in sorted(parts)]) for name, parts in joined.items()
    }


def layers_by_slot(names: Iterable[str], slot_of: Slots) -> dict[str, tuple[str, ...]]:
    """Group the layers with a weight by their original name, in the order of its rows."""
    parts: dict[str, dict[int, str]] = {}
    for name in names:
        layer, _, kind = name.rpartition(".")
        if kind == "weight" and (slot := slot_of(name)).name.endswith(".weight"):
            parts.setdefault(slot.name.removesuffix(".weight"), {})[slot.part] = layer
    return {slot: tuple(parts[slot][n] for n in sorted(parts[slot])) for slot in parts}


def rows_of(parts: list[LazyTensor]) -> LazyTensor:
    """Join the rows of several tensors."""
    if len(parts) == 1:
        return parts[0]
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    return LazyTensor(parts[0].dtype, shape, lambda: torch.cat([part.read() for part in parts]))


def swap_halves(stored: LazyTensor) -> LazyTensor:
    """Return a tensor with the second half of its rows first."""

    def read() -> torch.Tensor:
        first, second = stored.read().chunk(2)
        return torch.cat([second, first])

    return LazyTensor(stored.dtype, stored.shape, read)


def flux_width(weights: ExportedWeights) -> int:
    """Return the width of a Flux's layers."""
    config = weights.config(weights.part)
    width: int = config["num_attention_heads"] * config["attention_head_dim"]
    return width
