"""Values of a launch with where each comes from, under dotted keys: what both files are made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

Source = Literal["user", "derived", "default"]
Settings = dict[str, tuple[Any, Source, str]]
"""Dotted key to value, source and reason."""


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values under dotted keys as a file has them."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        *path, last = key.split(".")
        inside = found
        for name in path:
            inside = inside.setdefault(name, {})
        inside[last] = value
    return found


def leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of everything in a file's form that is no mapping with content."""
    for key, value in section.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
