"""What `make fuzz` knows of a reader of files that people exchange."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from zerotrain import artifact
from zerotrain.errors import PipelineError


@dataclass(frozen=True)
class Reader:
    """A reader, and how to make a folder with a whole input."""

    write: Callable[[Path], None]
    """Writes the files into a folder."""
    read: Callable[[Path, Path], object]
    """Reads a folder, one of whose files is damaged; it may only raise PipelineError."""
    files: str = "**/*"
    """Which of the files are damaged."""
    opens: bool = True
    """Whether it opens the files itself: links, pipes and folders may then be in their places."""


def vouch_for(folder: Path, file: Path) -> None:
    """Let the manifest of a folder have the hash of a damaged file, as a hostile one does."""
    path = folder / artifact.MANIFEST
    if file == path or not file.is_file():
        return
    try:
        entry = {"sha256": artifact.file_sha256(file), "bytes": file.stat().st_size}
    except PipelineError:  # a link to a device
        return
    found = json.loads(path.read_bytes())
    found["files"][file.relative_to(folder).as_posix()] = entry
    path.unlink()  # it is a link to the whole one
    path.write_text(json.dumps(found), encoding="utf-8")
