"""Which layers a token route spans, and how many tokens it keeps."""

from __future__ import annotations

from typing import Any

import pytest

from zerotrain.config.token_routes import kept_tokens, route_layers
from zerotrain.errors import PipelineError


def route(start: int, end: int) -> dict[str, Any]:
    """A route between two layers."""
    return {"selection_ratio": 0.5, "start_layer_idx": start, "end_layer_idx": end}


def test_layers_are_counted_from_either_end_and_both_ends_belong_to_the_route():
    assert route_layers([route(2, -2)], 57) == [range(2, 56)]
    assert route_layers([route(0, 0), route(1, 3), route(-1, -1)], 6) == [
        range(1),
        range(1, 4),
        range(5, 6),
    ]


@pytest.mark.parametrize(
    ("routes", "reason"),
    [
        ([route(2, 6)], r"routes\.0\.end_layer_idx: 6 is no layer of the base, which has 6"),
        ([route(-7, 2)], r"routes\.0\.start_layer_idx: -7 is no layer"),
        ([route(3, -4)], r"routes\.0: layers 3 to 2 of 6: the route ends before it starts"),
        ([route(0, 2), route(2, 4)], r"routes\.1: starts at layer 2, .* ends at layer 2 of 6"),
        ([route(3, 4), route(0, 1)], r"routes\.1: starts at layer 0"),
    ],
)
def test_routes_that_the_base_cannot_have_are_refused(routes, reason):
    with pytest.raises(PipelineError, match=reason):
        route_layers(routes, 6)


def test_the_share_that_passes_by_is_rounded():
    assert [kept_tokens(16, ratio) for ratio in (0.0, 0.5, 0.7, 0.99)] == [16, 8, 5, 0]
