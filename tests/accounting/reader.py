"""What the table of docs/foreign-files.md says of a reader, and how the reader is tried."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerotrain.errors import PipelineError

REFUSED, NAMED = "refused", "left out, named"
Tell = Callable[[Path, str | None], str]
"""Reads a valid input with one more name, or without it, and returns what it says of names."""


@dataclass(frozen=True)
class Reader:
    """A reader of names that a person or another program wrote.

    Attributes:
        names: What has the names.
        leftover: What becomes of a name that nothing uses: REFUSED or NAMED.
        where: Where the name is shown.
        tell: Tries it in an empty folder.
    """

    names: str
    leftover: str
    where: str
    tell: Tell


def refusal(read: Callable[..., object], *arguments: Any) -> str:
    """What a reader refuses; nothing if it reads."""
    try:
        read(*arguments)
    except PipelineError as error:
        return str(error)
    return ""


def more(values: dict[str, Any], name: str | None, value: Any = 1) -> dict[str, Any]:
    """The same values, and the one of the further name."""
    return values if name is None else {**values, name: value}
