"""A part of a model, as described by its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Part:
    """Model of a base: a library's class and its config.json.

    Attributes:
        library: `diffusers` or `transformers`.
        class_name: The class's name in the library.
        config: The values of its config.json.
        parameters: Number of parameters, tied ones once; None if only building the model shows it.
    """

    library: str
    class_name: str
    config: Mapping[str, Any]
    parameters: int | None = None
