"""Token routes (train.tread_config): which layers they span, and how many tokens they keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from pydantic import Field

from zerotrain.config.section import Section, Whole
from zerotrain.errors import PipelineError


class TokenRoute(Section):
    """A range of layers that a share of the image's tokens passes by."""

    selection_ratio: float = Field(ge=0, lt=1, description="Share of the tokens that pass by.")
    start_layer_idx: Whole = Field(
        description="First layer of the range, counted from 0, or from the end: -1 is the last."
    )
    end_layer_idx: Whole = Field(description="Last layer of the range, counted in the same way.")


class TreadConfig(Section):
    """TREAD: image tokens, drawn at random, that pass a range of layers by in training.

    Krause et al., "TREAD: Token Routing for Efficient Architecture-agnostic Diffusion Training"
    (2025), https://arxiv.org/abs/2501.04765.
    """

    routes: list[TokenRoute] = Field(
        min_length=1, description="The ranges, one after the other; none overlaps another."
    )


def route_layers(routes: Sequence[Mapping[str, Any]], layers: int) -> list[range]:
    """Return the layers of each route, of a model with so many.

    Args:
        routes: Each with `start_layer_idx` and `end_layer_idx`, which belongs to it; negative ones
            count from the end.
        layers: Blocks of the model: double-stream ones and then single-stream ones.

    Raises:
        PipelineError: an index is no layer, a route ends before it starts, or two overlap or are
            not in the order of their layers.
    """
    found = []
    for number, route in enumerate(routes):
        ends = []
        for key in ("start_layer_idx", "end_layer_idx"):
            index = route[key]
            if not -layers <= index < layers:
                raise PipelineError(
                    f"tread_config.routes.{number}.{key}: {index} is no layer of the base, which "
                    f"has {layers}",
                    hint=f"give 0 to {layers - 1}, or -{layers} to -1 counted from the end",
                )
            ends.append(index % layers)
        if ends[1] < ends[0]:
            raise PipelineError(
                f"tread_config.routes.{number}: layers {ends[0]} to {ends[1]} of {layers}: the "
                "route ends before it starts",
                hint="let end_layer_idx be start_layer_idx or a later layer",
            )
        found.append(range(ends[0], ends[1] + 1))
    for number, (before, after) in enumerate(pairwise(found), start=1):
        if after.start < before.stop:
            raise PipelineError(
                f"tread_config.routes.{number}: starts at layer {after.start}, and the route "
                f"before ends at layer {before.stop - 1} of {layers}",
                hint="list the routes in the order of their layers, without overlap",
            )
    return found


def kept_tokens(tokens: int, selection_ratio: float) -> int:
    """Return how many of so many tokens a route keeps; the share that passes by is rounded."""
    return tokens - round(tokens * selection_ratio)
