"""Checks of folders from others: names and types in a manifest, and targets of links.

Folders are exchanged: a hostile one must not make a reader open, copy or replace a file outside.
"""

from __future__ import annotations

import json
import os
import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from zerotrain.errors import PipelineError

PARTS = ("content", "files", "parents", "made_by")
TYPES = {list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
DRIVE = re.compile(r"[A-Za-z]:")
SHA256 = re.compile(r"[0-9a-f]{64}")
BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
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
    if error := _find_text_error(name):
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
            f"{where}: the name {_quote(name)} {error}",
            hint="names are relative, with forward slashes and without `..`; do not use files of "
            "which you do not know who made them",
        )
    return str(name)


def read_shard_names(index: Path) -> list[str]:
    """Read the names of a model's files from its index (`model.safetensors.index.json`).

    Args:
        index: The index, in the folder of the files.

    Returns:
        The names, sorted.

    Raises:
        PipelineError: it is not such an index, or a name leaves the folder.
    """
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise PipelineError(
            f"{index}: not an index of a model's files ({type(error).__name__}: {error})",
            hint="copy or download the folder again",
        ) from error
    return sorted({check_name(name, index) for name in names})


def find_manifest_error(found: dict[str, Any], text: str) -> str | None:
    """Return what is wrong with a manifest's parts, as readers rely on their types and names.

    Args:
        found: The manifest's JSON.
        text: The text that it was parsed from.

    Returns:
        A sentence on the first error; None if there is no error.
    """
    for part in PARTS:
        if not isinstance(found.get(part), dict):
            kind = TYPES.get(type(found[part]), "null") if part in found else None
            return f"{part} is {kind}, not an object" if kind else f"no {part}"
    if error := _find_files_error(found["files"]) or _find_parents_error(found["parents"]):
        return error
    if SURROGATE.search(text):  # perhaps half of a pair, of which no digest can be made
        try:
            json.dumps(found, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            return "has text that is not valid Unicode"
    return None


def _find_files_error(files: dict[str, Any]) -> str | None:
    for name, entry in files.items():
        if error := find_name_error(name):
            return f"files: the name {_quote(name)} {error}"
        if not isinstance(entry, dict) or not {"sha256", "bytes"} <= entry.keys():
            return f"files: {_quote(name)} has no sha256 or no bytes"
        sha256, size = entry["sha256"], entry["bytes"]
        if not isinstance(sha256, str) or not SHA256.fullmatch(sha256):
            return f"files: {_quote(name)} has the sha256 {sha256!r}, not 64 hexadecimal digits"
        if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < 2**63:
            return f"files: {_quote(name)} has the size {size!r:.40}, not a number of bytes"
    folders = {"/".join(parts[:end]) for parts in _split(files) for end in range(1, len(parts))}
    for name in files:
        if name in folders:
            return f"files: {_quote(name)} is listed as a file and as a folder"
    return None


def _find_parents_error(parents: dict[str, Any]) -> str | None:
    for name, entry in parents.items():
        values = [entry.get(key) for key in ("path", "identity")] if isinstance(entry, dict) else []
        if len(values) != 2 or not all(isinstance(value, str) for value in values):
            return f"parents: {_quote(name)} has no path or no identity"
        if error := _find_text_error(str(values[0])):
            return f"parents: the path {_quote(values[0])} {error}"
    return None


def check_links(folder: Path, name: str, kind: str) -> None:
    """Check that a listed file is in its folder after links are resolved.

    A base consists of links to the files of a model, which must keep their suffix: a weights or
    JSON file is never a link to another kind. Files in the hub's cache are named by their content,
    so only someone who has a file can name it there.

    Args:
        folder: The published folder.
        name: The file's name in it.
        kind: The folder's kind.

    Raises:
        PipelineError: a link leads to another place.
    """
    path = folder / name
    target = Path(os.path.realpath(path))
    if target.is_relative_to(os.path.realpath(folder)) or is_hub_blob(target):
        return
    if kind == "base" and target.suffix and target.suffix == path.suffix:
        return
    raise PipelineError(
        f"{path}: a link that leads out of the folder, to {target}",
        hint="files of a published folder are in it: build the folder again, or copy the file in "
        "the link's place if you know who made the link",
    )


def is_hub_blob(path: Path) -> bool:
    """Return whether a resolved path is a file in the hub's cache, named by its content."""
    at_hub = path.parent.name == "blobs" and path.parents[1].name.startswith("models--")
    return at_hub and BLOB.fullmatch(path.name) is not None


def _find_text_error(text: str) -> str | None:
    try:
        text.encode()
    except UnicodeEncodeError:
        return "is not valid Unicode"
    if any(unicodedata.category(letter) in LINE_ENDS for letter in text):
        return "holds a control character"
    return None


def _split(names: Iterable[str]) -> list[list[str]]:
    return [name.split("/") for name in names]


def _quote(name: Any) -> str:
    """Format a hostile name on one line that is safe for a terminal."""
    return ascii(name)
