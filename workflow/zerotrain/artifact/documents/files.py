"""Files read as a whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from zerotrain.artifact.documents.limits import AGAIN, MOST_BYTES, MOST_LINE_BYTES, DocumentError
from zerotrain.machine.regular_file import open_to_read


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
