"""What the sections of a configuration have in common: frozen models and forgiving numbers."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema


def _whole_number(value: Any) -> Any:
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            return value
        return int(number) if number.is_integer() else number
    return value


Whole = Annotated[int, BeforeValidator(_whole_number)]
"""An integer; "1e3" and "1000" are taken as 1000."""

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]
"""A folder name: letters, digits, - and _, starting with a letter or digit."""


UNITS = {
    "": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30,
    "ti": 2**40,
}  # fmt: skip


def _bytes(value: Any) -> Any:
    """A size such as "24 GiB", "24GB" or a number of bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?|)b?\s*", str(value), re.IGNORECASE)
    if isinstance(value, bool) or not match:
        raise ValueError('must be a size such as "24 GiB"')
    return int(float(match[1]) * UNITS[match[2].lower()])


Memory = Annotated[
    int,
    BeforeValidator(_bytes),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 1},
                {"type": "string", "pattern": r"^\s*[0-9.]+\s*([kKmMgGtT]i?)?[bB]?\s*$"},
            ]
        }
    ),
]
"""Bytes; "24 GiB" is taken as 24 * 2**30."""


class Section(BaseModel):
    """A part of the configuration: frozen, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
