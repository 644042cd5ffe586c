"""What no document has more of: bytes, values, levels, digits."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterator
from types import NoneType
from typing import Any

from zerotrain.errors import PipelineError

MOST_BYTES = 64 * 2**20
"""Size of a file that is read as a whole; the index of a large model has some MB."""
MOST_LINE_BYTES = 16 * 2**20
"""Size of a line of JSON Lines."""
MOST_HEADER_BYTES = 100 * 2**20
"""Size of the header of a safetensors file: the format's own limit."""
MOST_VALUES = 100_000
"""Values that a YAML text stands for: configurations have some hundreds."""
MOST_LEVELS = 50
"""Levels of lists and sections within one another; Python's own limit is at some hundreds."""
MOST_BITS = 128
"""Of a whole number: transformers writes 10**30 for a length without limit. Where a record has a
type, that says more."""
SCALARS = (str, bool, int, float, NoneType, datetime.date, datetime.time)
"""Types of single values; a datetime is a date."""
DEEP = f"its values are nested more than {MOST_LEVELS} deep"
AGAIN = "copy the file again from where it came from, or make it again"


class DocumentError(PipelineError, ValueError):
    """A document that cannot be parsed, or has values of a wrong type.

    Args:
        source: What holds it: a file, or what messages call it.
        why: The end of a sentence that begins with the source.
        hint: What to do next.
    """

    def __init__(self, source: object, why: str, *, hint: str = AGAIN) -> None:
        super().__init__(f"{source}: {why}", hint=hint)
        self.why = why


class LimitError(ValueError):
    """A document that is larger as values than anybody would write."""


def check_levels(found: Any) -> None:
    """Check how deeply lists and objects are nested.

    Raises:
        LimitError: more than MOST_LEVELS.
    """
    level, depth = [found], 0
    while level := [
        inner
        for outer in level
        if type(outer) in (dict, list)
        for inner in (outer.values() if type(outer) is dict else outer)
        if type(inner) in (dict, list)
    ]:
        depth += 1
        if depth >= MOST_LEVELS:
            raise LimitError(DEEP)


def check_values(found: Any) -> None:
    """Check the types, numbers and texts of a parsed document.

    Raises:
        LimitError: a value has a type that JSON does not have (dates are allowed), a number is not
            finite or does not fit, or a text is not valid Unicode; the message names its key.
    """
    for path, value in _scalars(found, ""):
        at = f"{path}: " if path else ""
        if isinstance(value, str):
            check_text(value, at)
        elif isinstance(value, float) and not math.isfinite(value):
            raise LimitError(f"{at}{value} is no finite number")
        elif isinstance(value, int) and value.bit_length() > MOST_BITS:
            bits = value.bit_length()
            raise LimitError(f"{at}a whole number of {bits:,} bits, more than {MOST_BITS}")
        elif not isinstance(value, SCALARS):
            raise LimitError(f"{at}is of the type {type(value).__name__}, which is not read")


def check_text(text: str, at: str = "") -> None:
    """Check that a text can be written as UTF-8.

    Raises:
        LimitError: it has half of a surrogate pair.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise LimitError(f"{at}has text that is not valid Unicode") from error


def _scalars(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield path, key
            yield from _scalars(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _scalars(inner, f"{path}[{number}]")
    else:
        yield path, value
