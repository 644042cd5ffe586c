"""Configurations of runs."""

from __future__ import annotations

from typing import Any

from zerotrain.config.read import parse_config
from zerotrain.config.run import RunConfig


def make_run(**sections: Any) -> dict[str, Any]:
    """The smallest configuration as a file has it, with these sections and keys."""
    smallest = {"run": "r", "base": "nano", "data": {"images": "photos"}}
    return smallest | {"phases": [{"name": "a", "until": 1}]} | sections


def make_config(**sections: Any) -> RunConfig:
    """The same, read."""
    return parse_config(make_run(**sections), "test")
