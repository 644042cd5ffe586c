"""What the sections of a configuration have in common: frozen models, forgiving numbers, roles."""

from __future__ import annotations

import re
from enum import Enum
from functools import cache
from typing import Annotated, Any, TypeAlias

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

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$", max_length=200)]
"""A folder name: letters, digits, - and _, starting with a letter or digit.

File systems take 255 bytes, and drafts have longer names than their folders.
"""


UNITS = {
    "": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30,
    "ti": 2**40,
}  # fmt: skip


def _bytes(value: Any) -> Any:
    """Parse a size such as "24 GiB", "24GB" or a number of bytes."""
    match = re.fullmatch(
        r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*([kmgt]i?|)b?\s*", str(value), re.IGNORECASE
    )
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


PromptImages = list[Annotated[list[str], Field(min_length=1)]]
"""Files of the conditioning images of each prompt."""
ConditionedPrompt: TypeAlias = tuple[str, tuple[str, ...]]
"""A prompt and the files of its conditioning images."""


def is_none(value: Any) -> bool:
    """Return whether a key is not given: such a key is left out of what stages depend on."""
    return value is None


Side = Annotated[Whole, Field(ge=8, multiple_of=8)]
"""Width or height of an image in pixels."""


class Section(BaseModel):
    """A part of the configuration: frozen, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)


class Role(Enum):
    """A property of a key that other modules ask for, given in the annotation of its field."""

    UNTRAINED = "decides nothing of what is trained: where tensors are, names, logging, saving"
    ROUNDING = "changes the rounding of a step only"
    ABSENT_IF_NONE = "is left out of run.yaml where it is None"
    UNRESOLVED = "is read when a launch is rendered, and not by the training"
    IMAGES = "has a meaning for families of images"
    TEXT = "has a meaning for families of text"
    OF_EMA = "has a meaning with use_ema"


@cache
def keys_with(section: type[BaseModel], role: Role) -> tuple[str, ...]:
    """Return the keys of a section that have a role, in the order of the section."""
    fields = section.model_fields
    return tuple(key for key, field in fields.items() if role in field.metadata)
