"""SimpleTuner's tread_config: the routes by which image tokens bypass layers.

Source: simpletuner/helpers/training/tread.py, and helpers/models/{flux,sd3}/transformer.py at
bc8e6ab7. Its manual describes importance-based selection; its code draws at random (l1_reg is 0).
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from zerotrain.config.families import FAMILIES
from zerotrain.errors import PipelineError
from zerotrain.importers.imported_config import ImportedConfig

NAME = "tread_config"
KEYS = ("selection_ratio", "start_layer_idx", "end_layer_idx")
HAS = f"a route has {', '.join(KEYS)}"


def put_token_routes(arguments: Mapping[str, Any], result: ImportedConfig) -> None:
    """Set train.tread_config.

    Raises:
        PipelineError: there are no routes, a route lacks keys, or the family's tokens cannot be
            routed here.
    """
    given = arguments.get(NAME)
    if not given:
        return
    family = str(result.values.get("family"))
    if family in FAMILIES and not FAMILIES[family].token_routing:
        able = ", ".join(name for name, kind in FAMILIES.items() if kind.token_routing)
        raise PipelineError(
            f"{NAME}: tokens of {family} cannot be routed here, only those of {able}",
            hint=f"`--skip {NAME}` trains every layer on all tokens",
        )
    routes = _read(given).get("routes")
    if not isinstance(routes, list) or not routes:
        raise PipelineError(f"{NAME}: names no routes", hint="add a list `routes`")
    found = [_read_route(f"{NAME}.routes.{number}", route) for number, route in enumerate(routes)]
    result.keep(NAME, given, "train.tread_config", {"routes": found})


def _read(given: Any) -> Mapping[str, Any]:
    """Return a mapping, also from a Python dictionary's text, as in command lines."""
    if isinstance(given, str):
        try:
            given = ast.literal_eval(given)
        except (ValueError, SyntaxError):
            given = None
    if not isinstance(given, Mapping):
        raise PipelineError(f"{NAME}: must be keys with values", hint='such as {"routes": [{...}]}')
    return given


def _read_route(where: str, route: Any) -> dict[str, Any]:
    if not isinstance(route, Mapping):
        raise PipelineError(f"{where}: must be keys with values (found {route!r})", hint=HAS)
    for name in route:
        if name not in KEYS:
            raise PipelineError(f"{where}.{name}: unknown key", hint=HAS)
    for name in KEYS:
        value = route.get(name)
        whole = isinstance(value, int) and not isinstance(value, bool)
        if name not in route:
            raise PipelineError(f"{where}.{name} is missing", hint=HAS)
        if not whole and (name != KEYS[0] or not isinstance(value, float)):
            raise PipelineError(f"{where}.{name} is {value!r}", hint="give a number")
    ratio = route[KEYS[0]]
    if not 0 <= ratio < 1:
        raise PipelineError(
            f"{where}.{KEYS[0]} is {ratio}, which leaves no token or too many",
            hint="give the share of tokens that pass by: 0.5 lets half of them take part",
        )
    return dict(route)
