"""The text of a caption file."""

from __future__ import annotations

import codecs
from pathlib import Path

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
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise BadCaptionError(f"has {size:,} bytes; captions are read up to {MOST_BYTES:,}")
    content = path.read_bytes()
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
