"""The types of a phase's values, by which a damaged run.yaml is recognised."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError

from zerotrain.config.section import Section
from zerotrain.launch.resolved import OWNERS, SECTIONS, Derived, ResolvedPhase


def check_types(values: Mapping[str, Any]) -> None:
    """Check that each value has the type of its key; unknown keys are not looked at.

    Raises:
        ValueError: a value is of another type; the message names its key.
    """
    for key, value in values.items():
        if key not in OWNERS:
            continue
        try:
            _type_of(key).validate_python(value)
        except ValidationError as error:
            raise ValueError(f"{key}: {error.errors()[0]['msg']}") from error


@cache
def _type_of(key: str) -> TypeAdapter[Any]:
    """Return the type of a key's value. A key of a section may not apply, and then it is None."""
    owner = OWNERS[key]
    if owner not in SECTIONS:
        return TypeAdapter(get_type_hints(Derived if owner else ResolvedPhase)[key])
    annotation: Any = SECTIONS[owner].model_fields[key].annotation
    if any(issubclass(kind, Section) for kind in _classes(annotation)):
        return TypeAdapter(Any)  # the section itself validates it
    return TypeAdapter(annotation | None)


def _classes(annotation: Any) -> Iterator[type]:
    """Yield the classes that an annotation names."""
    if isinstance(annotation, type):
        yield annotation
    for one in get_args(annotation):
        yield from _classes(one)
