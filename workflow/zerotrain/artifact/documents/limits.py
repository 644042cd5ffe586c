"""What no document has more of, bytes, values, levels, digits; and files read as a whole."""

from __future__ import annotations

import datetime
import math
import os
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any

from zerotrain.errors import PipelineError
from zerotrain.machine.regular_file import open_to_read

MOST_BYTES = 64 * 2**20
"""Size of a file that is read as a whole; the index of a large model has some MB."""
MOST_LINE_BYTES = 16 * 2**20
"""Size of a line of JSON Lines."""
MOST_HEADER_BYTES = 100 * 2**20
"""Size of the header of a safetensors file: the format's own limit."""
MOST_VALUES = 100_000
"""Values that a YAML text stands for: configurations have some hundreds."""
MOST_LEVELS = 50
"""Levels of lists and sections within one another; Python's own limit is at some hundreds."""
MOST_BITS = 128
"""Of a whole number: transformers writes 10**30 for a length without limit. Where a record has a
type, that says more."""
SCALARS = (str, bool, int, float, NoneType, datetime.date, datetime.time)
"""Types of single values; a datetime is a date."""
DEEP = f"its values are nested more than {MOST_LEVELS} deep"
AGAIN = "copy the file again from where it came from, or make it again"


class DocumentError(PipelineError, ValueError):
    """A document that cannot be parsed, or has values of a wrong type.

    Args:
        source: What holds it: a file, or what messages call it.
        why: The end of a sentence that begins with the source.
        hint: What to do next.
    """

    def __init__(self, source: object, why: str, *, hint: str = AGAIN) -> None:
        super().__init__(f"{source}: {why}", hint=hint)
        self.why = why


class LimitError(ValueError):
    """A document that is larger as values than anybody would write."""


def check_levels(found: Any) -> None:
    """Check how deeply lists and objects are nested.

    Raises:
        LimitError: more than MOST_LEVELS.
    """
    level, depth = [found], 0
    while level := [
        inner
        for outer in level
        if type(outer) in (dict, list)
        for inner in (outer.values() if type(outer) is dict else outer)
        if type(inner) in (dict, list)
    ]:
        depth += 1
        if depth >= MOST_LEVELS:
            raise LimitError(DEEP)


def check_values(found: Any) -> None:
    """Check the types, numbers and texts of a parsed document.

    Raises:
        LimitError: a value has a type that JSON does not have (dates are allowed), a number is not
            finite or does not fit, or a text is not valid Unicode; the message names its key.
    """
    for path, value in _scalars(found, ""):
        at = f"{path}: " if path else ""
        if isinstance(value, str):
            check_text(value, at)
        elif isinstance(value, float) and not math.isfinite(value):
            raise LimitError(f"{at}{value} is no finite number")
        elif isinstance(value, int) and value.bit_length() > MOST_BITS:
            bits = value.bit_length()
            raise LimitError(f"{at}a whole number of {bits:,} bits, more than {MOST_BITS}")
        elif not isinstance(value, SCALARS):
            raise LimitError(f"{at}is of the type {type(value).__name__}, which is not read")


def check_text(text: str, at: str = "") -> None:
    """Check that a text can be written as UTF-8.

    Raises:
        LimitError: it has half of a surrogate pair.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise LimitError(f"{at}has text that is not valid Unicode") from error


def _scalars(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield path, key
            yield from _scalars(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _scalars(inner, f"{path}[{number}]")
    else:
        yield path, value


def read_bytes(
    path: Path, *, most: int = MOST_BYTES, follow_links: bool = False, hint: str = AGAIN
) -> bytes:
    """Read a file as a whole.

    Args:
        path: The file.
        most: Its largest size in bytes.
        follow_links: Whether a link is followed, as for files that the user names.
        hint: Of the error if it is larger.

    Raises:
        FileError: it is missing, or is a link, a folder, a pipe or a device.
        DocumentError: it is larger.
    """
    with open_to_read(path, follow_links=follow_links) as stream:
        size = os.fstat(stream.fileno()).st_size  # a read of `most` would take memory for it
        data = stream.read(size + 1) if size <= most else b""
        if size < len(data) <= most:  # it grows
            data += stream.read(most + 1 - len(data))
    if max(size, len(data)) > most:
        raise DocumentError(path, f"has more than {most:,} bytes", hint=hint)
    return data


def read_text(
    path: Path,
    *,
    most: int = MOST_BYTES,
    follow_links: bool = False,
    hint: str = AGAIN,
    errors: str = "strict",
    encoding: str = "utf-8",
) -> str:
    """Read a text file as a whole, with line ends as they are; see read_bytes.

    Raises:
        FileError: it is missing, or is a link, a folder, a pipe or a device.
        DocumentError: it is larger, or no text in this encoding.
    """
    data = read_bytes(path, most=most, follow_links=follow_links, hint=hint)
    return decode(data, path, hint, encoding, errors)


def read_lines(path: Path, *, follow_links: bool = False, hint: str = AGAIN) -> Iterator[bytes]:
    """Yield the lines of a file, each with its end.

    Raises:
        FileError: it is missing, or is a link, a folder, a pipe or a device.
        DocumentError: a line has more than MOST_LINE_BYTES.
    """
    with open_to_read(path, follow_links=follow_links) as stream:
        while line := stream.readline(MOST_LINE_BYTES + 1):
            if len(line) > MOST_LINE_BYTES:
                why = f"has a line of over {MOST_LINE_BYTES:,} bytes"
                raise DocumentError(path, why, hint=hint)
            yield line


def decode(
    data: bytes, source: object, hint: str, encoding: str = "utf-8", errors: str = "strict"
) -> str:
    """Decode a text.

    Raises:
        DocumentError: it is no text in this encoding.
    """
    try:
        return data.decode(encoding, errors)
    except UnicodeDecodeError as error:
        name = error.encoding.upper()
        why = f"byte {error.start + 1:,} is not {name}: save the file as {name}"
        raise DocumentError(source, why, hint=hint) from error
