"""What an evaluation has made and measured of a phase's weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Measured:
    """Of images or of text."""

    metrics: Mapping[str, float | None]
    """By their names in metrics.json; None where there was nothing to measure."""
    prompts: list[str]
    """Of text the last question of each conversation."""
    shown: str
    """The file to look at first."""
    write: Callable[[Path], None]
    """Writes what was made into a folder."""
