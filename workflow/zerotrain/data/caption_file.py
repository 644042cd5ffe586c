"""The caption of an image: the text of its file, or the name of its folder.

In kohya's folders, the images in `10_sks dog` come 10 times. Source: train_util.py of kohya's
sd-scripts. Only the folder that holds an image counts.
"""

from __future__ import annotations

import codecs
import re
from dataclasses import replace
from pathlib import Path

from zerotrain.artifact.documents import DocumentError, read_bytes
from zerotrain.data.source import Found

MOST_BYTES = 2**24
"""Size of the largest caption file that is read: a hundred times what any text encoder reads, and
far less than a file of another kind that has the extension of captions."""
UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


class BadCaptionError(Exception):
    """A caption file that cannot be used; the text gives the reason, as part of a sentence."""


def read_caption_file(path: Path) -> str:
    """Read a caption file in UTF-8, with or without a byte order mark, without blanks at its ends.

    Raises:
        BadCaptionError: it is not UTF-8, holds a NUL, is empty, or has more than MOST_BYTES.
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
    try:
        caption = content.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        at = f"byte 0x{error.object[error.start]:02x} at position {error.start}"
        raise BadCaptionError(f"is not UTF-8 ({at})") from error
    if "\0" in caption:
        raise BadCaptionError(f"holds a NUL byte at position {content.index(0)}, which no text has")
    if not caption:
        raise BadCaptionError("is empty")
    return caption


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
