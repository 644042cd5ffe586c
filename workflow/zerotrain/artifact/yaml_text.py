"""YAML of others, read without code and without more values than a person would write."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

MOST_VALUES = 1_000_000
"""Values that a file may have where its aliases are written out."""
MOST_LEVELS = 1000
"""Levels of lists and sections; libyaml takes a time that grows with their square, and with 100,000
of them all of its stack."""
BRACKET = re.compile(r"[\[\]{}]")
DASHES = re.compile(rf"(?:[-?][ \t]+){{{MOST_LEVELS}}}")
"""Lists in lists on one line."""


class TooMuchYAMLError(YAMLError):  # type: ignore[misc]
    """More than a person would write; readers report it as they do a syntax error."""


def load_yaml(text: str) -> Any:
    """Read YAML 1.2.

    An alias is read as the same object again, so a few bytes can stand for more values than fit
    into memory once something copies, checks or prints them.

    Raises:
        YAMLError: it is not YAML, or is nested too deeply, or its aliases repeat too much.
    """
    if _nesting(text) > MOST_LEVELS or DASHES.search(text):
        raise TooMuchYAMLError(f"more than {MOST_LEVELS:,} levels of lists or sections")
    loaded = YAML(typ="safe").load(text)
    _count(loaded, {}, set())
    return loaded


def _nesting(text: str) -> int:
    """Return how deep brackets are nested, at most; those in quoted text count, too."""
    depth = most = 0
    for found in BRACKET.finditer(text):
        depth = depth + 1 if found[0] in "[{" else max(0, depth - 1)
        most = max(most, depth)
    return most


def _count(value: Any, counted: dict[int, int], inside: set[int]) -> int:
    """Count the values of a part, each alias as what it repeats.

    Args:
        value: The part.
        counted: Counts of parts by their identity.
        inside: Identities of the parts that this one is in.

    Raises:
        TooMuchYAMLError: the part contains itself, or has more than MOST_VALUES.
    """
    parts: Iterable[Any]
    if isinstance(value, dict):
        parts = [*value.keys(), *value.values()]
    elif isinstance(value, list | tuple | set):
        parts = value
    else:
        return 1
    place = id(value)
    if place in inside:
        raise TooMuchYAMLError("an alias is inside of what it repeats")
    if place not in counted:
        inside.add(place)
        counted[place] = 1 + sum(_count(part, counted, inside) for part in parts)
        inside.remove(place)
        if counted[place] > MOST_VALUES:
            raise TooMuchYAMLError(f"aliases repeat more than {MOST_VALUES:,} values")
    return counted[place]
