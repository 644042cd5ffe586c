"""A denoiser's tensors in its original layout: the place of each, and several joined to one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from zerotrain.formats import sdxl_names
from zerotrain.formats.mmdit_names import Place, flux_place, sd3_places
from zerotrain.formats.tensors import Stored
from zerotrain.formats.weights import ExportedWeights

Places = Callable[[str], Place]
"""Gives the place of a tensor by diffusers' name of it."""


def _sdxl(config: Mapping[str, Any]) -> Places:
    name_of = sdxl_names.unet_names(config)
    return lambda name: Place(name_of(name))


PLACES: Mapping[str, Callable[[Mapping[str, Any]], Places]] = {
    "sdxl": _sdxl,
    "sd3": sd3_places,
    "flux": lambda config: flux_place,
    # diffusers took over the original's names.
    "qwen_image": lambda config: Place,
}
"""Families whose original names are known, and who gives them from the denoiser's config.json."""
FLUX_WIDTH = 3072
"""diffusers splits what Flux has joined at this width, whatever the model's."""


def in_original_layout(tensors: Mapping[str, Stored], place_of: Places) -> dict[str, Stored]:
    """A denoiser's tensors under their original names, without a prefix."""
    joined: dict[str, dict[int, Stored]] = {}
    for name, stored in tensors.items():
        place = place_of(name)
        parts = joined.setdefault(place.name, {})
        parts[place.part] = swapped(stored) if place.swapped else stored
    return {
        name: rows_of([parts[number] for number in sorted(parts)]) for name, parts in joined.items()
    }


def layers_by_place(names: Iterable[str], place_of: Places) -> dict[str, tuple[str, ...]]:
    """The layers with a weight by the original's name of each, in the order of its rows."""
    found: dict[str, dict[int, str]] = {}
    for name in names:
        layer, _, kind = name.rpartition(".")
        if kind == "weight" and (place := place_of(name)).name.endswith(".weight"):
            found.setdefault(place.name.removesuffix(".weight"), {})[place.part] = layer
    return {place: tuple(found[place][n] for n in sorted(found[place])) for place in found}


def rows_of(parts: list[Stored]) -> Stored:
    """One tensor of the rows of several."""
    if len(parts) == 1:
        return parts[0]
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    return Stored(parts[0].dtype, shape, lambda: torch.cat([part.read() for part in parts]))


def swapped(stored: Stored) -> Stored:
    """With the second half of the rows first."""

    def read() -> torch.Tensor:
        first, second = stored.read().chunk(2)
        return torch.cat([second, first])

    return Stored(stored.dtype, stored.shape, read)


def flux_width(weights: ExportedWeights) -> int:
    """Width of a Flux's layers."""
    config = weights.config(weights.part)
    width: int = config["num_attention_heads"] * config["attention_head_dim"]
    return width
