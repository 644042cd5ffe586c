"""Values of a launch with their sources, by dotted key: the basis of both launch files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

Source = Literal["user", "derived", "default"]
Settings = dict[str, tuple[Any, Source, str]]
"""Dotted key to value, source and reason."""


def nest_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by dotted key in the nested form of a file."""
    nested: dict[str, Any] = {}
    for key, value in values.items():
        *path, last = key.split(".")
        inside = nested
        for name in path:
            inside = inside.setdefault(name, {})
        inside[last] = value
    return nested


def leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted key and value of every leaf of a nested mapping; {} counts as a leaf."""
    for key, value in section.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
