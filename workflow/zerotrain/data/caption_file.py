"""The captions of an image: the text of its file, a cell of a table, or the name of its folder.

In kohya's folders, the images in `10_sks dog` come 10 times. Source: train_util.py of kohya's
sd-scripts. Only the folder that holds an image counts.
"""

from __future__ import annotations

import codecs
import re
from dataclasses import replace
from pathlib import Path

from zerotrain.artifact.documents import DocumentError, parse_json, read_bytes
from zerotrain.config.image_source import UTF_8
from zerotrain.data.encodings import CANDIDATES, WrongEncodingError, decode_text
from zerotrain.data.source import Found
from zerotrain.data.table import is_absent, printable

MOST_BYTES = 2**24
"""Size of the largest caption file that is read: a hundred times what any text encoder reads, and
far less than a file of another kind that has the extension of captions."""
UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


class BadCaptionError(Exception):
    """A caption file that cannot be used; the text gives the reason, as part of a sentence."""


def read_caption_file(path: Path, encoding: str = UTF_8) -> str:
    """Read a caption file, with or without UTF-8's byte order mark, without blanks at its ends.

    Raises:
        BadCaptionError: it is not in the encoding, holds a NUL, is empty or too large.
        OSError: it cannot be read.
    """
    try:
        content = read_bytes(path, most=MOST_BYTES, follow_links=True)
    except DocumentError as error:
        size = path.stat().st_size
        raise BadCaptionError(
            f"has {size:,} bytes; captions are read up to {MOST_BYTES:,}"
        ) from error
    if content.startswith(UTF_16):
        raise BadCaptionError("is UTF-16; save it as UTF-8")
    caption = decode_caption(content, encoding).strip()
    if "\0" in caption:
        raise BadCaptionError(f"holds a NUL byte at position {content.index(0)}, which no text has")
    if not caption:
        raise BadCaptionError("is empty")
    return caption


def decode_caption(content: bytes, encoding: str) -> str:
    """Decode the bytes of a caption.

    Raises:
        BadCaptionError: they are in another encoding; the text says which it can be.
    """
    try:
        return decode_text(content, encoding)
    except WrongEncodingError as error:
        if error.readings:
            raise BadCaptionError(f"is {error}; data.caption_encoding: {error.readings}") from error
        *others, last = (one for one in CANDIDATES if one != encoding)
        raise BadCaptionError(f"is {error}, nor {', '.join(others)} or {last}") from error


def read_caption_cell(cell: object, where: str, *, in_csv: bool = False) -> tuple[str, ...]:
    """Return the captions in a cell of a table: a text, or a list of them.

    Args:
        cell: The cell.
        where: What messages call it.
        in_csv: Whether it can be a list only as JSON.

    Raises:
        BadCaptionError: it holds something else.
    """
    if in_csv and isinstance(cell, str) and (listed := _listed(cell.strip(), where)):
        return tuple(listed)
    if isinstance(cell, list) and cell:
        several = [(one, f"item {number} of {where}") for number, one in enumerate(cell, 1)]
        return tuple(_check_text(one, name) for one, name in several)
    return (_check_text(cell, where),)


def _check_text(cell: object, where: str) -> str:
    if is_absent(cell):
        raise BadCaptionError(f"no {where}")
    if not isinstance(cell, str):
        raise BadCaptionError(f"{where} is {type(cell).__name__}, not text")
    if not cell.strip():
        raise BadCaptionError(f"{where} is empty")
    if "\0" in cell:
        raise BadCaptionError(f"{where} holds a NUL, which no text has")
    if printable(cell) != cell:
        raise BadCaptionError(f"{where} is not valid Unicode")
    return cell.strip()


def _listed(cell: str, where: str) -> list[str] | None:
    """Parse a list of texts as JSON; None for another cell."""
    if not (cell.startswith("[") and cell.endswith("]")):
        return None
    if cell.startswith("['") and cell.endswith("']"):
        raise BadCaptionError(
            f'{where} is a list as Python prints it; write it as JSON, ["a cat", "a dog"]'
        )
    try:
        found = parse_json(cell, where)
    except DocumentError:
        return None
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        return None
    return [_check_text(one, f"item {number} of {where}") for number, one in enumerate(found, 1)]


REPEATED = re.compile(r"(\d+)_(.*)", re.DOTALL)


def folder_caption(root: Path, file: str, *, repeats: bool) -> str:
    """Return the name of an image's folder as its caption.

    Args:
        root: The folder of images.
        file: Name of the image in it.
        repeats: Whether `10_` at the beginning is a number of repeats, and no part of the caption.
    """
    name = (root.absolute() / file).parent.name
    named = REPEATED.fullmatch(name) if repeats else None
    return (named[2] if named else name).strip()


def repeat_as_named(entry: Found, root: Path) -> Found:
    """Return an entry with the repeats that its folder's name gives, or with a reason against it.

    An image in another folder is an error, as kohya's scripts leave such folders out.
    """
    name = (root.absolute() / entry.file).parent.name
    named = REPEATED.fullmatch(name)
    if named and int(named[1]):
        return replace(entry, repeats=int(named[1]))
    why = f"its folder {name!r} is not named REPEATS_NAME, as 10_cat (data.folder_repeats)"
    return replace(entry, reason=entry.reason or why)
