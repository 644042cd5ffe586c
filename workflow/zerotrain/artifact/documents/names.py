"""Names in documents of others that are joined to a folder."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path
from typing import Any

from zerotrain.artifact.documents.json_text import check_object, read_object
from zerotrain.artifact.documents.limits import DocumentError
from zerotrain.errors import PipelineError

DRIVE = re.compile(r"[A-Za-z]:")
LINE_ENDS = ("Cc", "Zl", "Zp")
"""Unicode categories of control characters and of line separators."""


def find_name_error(name: Any) -> str | None:
    """Return why a name from a file's content may not be joined to a folder.

    Args:
        name: Should be a relative path with forward slashes.

    Returns:
        The end of a sentence that starts with the name; None if the name stays in its folder.
    """
    if not isinstance(name, str):
        return "is not a string"
    if error := find_text_error(name):
        return error
    if "\\" in name:
        return "holds a backslash"
    if name.startswith("/") or DRIVE.match(name):
        return "is absolute"
    parts = name.split("/")
    if ".." in parts:
        return "leaves the folder"
    if "" in parts or "." in parts:
        return "has an empty part"
    return None


def check_name(name: Any, where: str | Path) -> str:
    """Check that a name from a file's content stays in its folder.

    Args:
        name: Should be a relative path with forward slashes.
        where: The file with the name, for the message.

    Returns:
        The name.

    Raises:
        PipelineError: it leaves the folder, or is not a name.
    """
    if error := find_name_error(name):
        raise PipelineError(
            f"{where}: the name {quote(name)} {error}",
            hint="names are relative, with forward slashes and without `..`; do not use files of "
            "which you do not know who made them",
        )
    return str(name)


def read_weight_map(index: Path, *, follow_links: bool = True) -> dict[str, str]:
    """Read which file has each tensor of a model (`model.safetensors.index.json`).

    Args:
        index: The index, in the folder of the files.
        follow_links: Whether the index may be a link, as in the hub's cache.

    Raises:
        FileError: it is missing, or is a folder, a pipe or a device.
        DocumentError: it is not such an index.
        PipelineError: a name leaves the folder.
    """
    hint = "copy or download the folder again"
    found = read_object(index, follow_links=follow_links, hint=hint)
    names = check_object(found.get("weight_map"), f"{index}: weight_map", hint=hint)
    if not names:
        raise DocumentError(index, "weight_map names no tensor", hint=hint)
    return {tensor: check_name(name, index) for tensor, name in names.items()}


def read_shard_names(index: Path, *, follow_links: bool = True) -> list[str]:
    """Read the names of a model's files from its index, sorted; see read_weight_map."""
    return sorted({*read_weight_map(index, follow_links=follow_links).values()})


def find_text_error(text: str) -> str | None:
    """Return why a text cannot be a path; None if it can be one."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return "is not valid Unicode"
    if any(unicodedata.category(letter) in LINE_ENDS for letter in text):
        return "holds a control character"
    return None


def quote(name: Any) -> str:
    """Format a hostile name on one line that is safe for a terminal."""
    return ascii(name)
