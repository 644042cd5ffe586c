"""Texts of a configuration that name files and folders, and that no file system could have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zerotrain.errors import PipelineError

PATHS = frozenset((
    "base", "images", "mask_images", "conditioning_images", "path", "metadata", "folder", "names",
    "resume_from_checkpoint", "offload_path",
))  # fmt: skip
"""Keys whose texts are paths, in whatever section they are."""
MOST_NAME, MOST_PATH = 255, 4095
"""Bytes that Linux allows of a name and of a path."""


def check_paths(values: Any) -> list[PipelineError]:
    """List the paths of a configuration's values that cannot be looked for."""
    return [
        PipelineError(f"{key}: {text[:100]!r} {why}", hint="correct the name")
        for key, text in _paths(values, "")
        if (why := _find_error(text))
    ]


def _find_error(text: str) -> str | None:
    """Return the end of a sentence that begins with the path; None if it can be looked for."""
    if "\0" in text:
        return "holds a null byte"
    data = text.encode(errors="replace")
    if len(data) > MOST_PATH or max(map(len, data.split(b"/"))) > MOST_NAME:
        return f"is longer than the {MOST_NAME} bytes of a name, or the {MOST_PATH:,} of a path"
    try:
        Path(text).expanduser()
    except RuntimeError:
        return "begins with the home folder of a user whom this machine does not know"
    return None


def _paths(values: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(values, dict):
        for name, inner in values.items():
            yield from _paths(inner, str(name))
    elif isinstance(values, list | tuple):
        for inner in values:
            yield from _paths(inner, key)
    elif isinstance(values, str) and key in PATHS:
        yield key, values
