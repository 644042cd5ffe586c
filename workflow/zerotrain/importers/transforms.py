"""Transforms of values, by the names that the column `to` of the tables has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from zerotrain.artifact.documents import parse_json
from zerotrain.errors import PipelineError

Transform = Callable[[str, Any], Any]
"""Takes the key's name for messages, and its value."""


def in_list(name: str, value: Any) -> list[Any]:
    """Return a list of the value alone."""
    return [value]


def to_upper(name: str, value: Any) -> str:
    """Return a name in upper case."""
    return str(value).upper()


def to_names(name: str, value: Any) -> list[str]:
    """Return the names of a text with commas."""
    return [part.strip() for part in str(value).split(",") if part.strip()]


def to_object(name: str, value: Any) -> dict[str, Any]:
    """Return the keys and values of a JSON text.

    Raises:
        PipelineError: it is not JSON, or not an object.
    """
    try:
        found = parse_json(value, name)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise PipelineError(
            f"{name}: {value!r} is not JSON of keys with values",
            hint=f"""write --{name} '{{"min_lr": 1e-6}}'""",
        )
    return found


def to_positive(name: str, value: Any) -> Any:
    """Return a number above 0.

    Raises:
        PipelineError: it is not.
    """
    if value <= 0:
        raise PipelineError(f"{name} is {value}", hint="give a number above 0")
    return value


def to_alpha(name: str, value: Any) -> str:
    """Return the loss mask that a switch of transparency turns on."""
    return "alpha"


def to_extension(name: str, value: Any) -> str:
    """Return a file name's extension with its point."""
    return str(value) if str(value).startswith(".") else f".{value}"


TRANSFORMS: Mapping[str, Transform] = {
    one.__name__: one
    for one in (in_list, to_upper, to_names, to_object, to_positive, to_alpha, to_extension)
}
