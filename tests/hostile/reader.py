"""What `make fuzz` knows of a reader of files that people exchange."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Reader:
    """A reader, and how to make a folder with a whole input."""

    write: Callable[[Path], None]
    """Writes the files into a folder."""
    read: Callable[[Path, Path], object]
    """Reads a folder, one of whose files is damaged; it may only raise PipelineError."""
    files: str = "**/*"
    """Which of the files are damaged."""
