"""What the sections of a configuration have in common: frozen models and forgiving numbers."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


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


class Section(BaseModel):
    """A part of the configuration: frozen, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
