"""Encodings of texts that are not UTF-8: which ones decode a text, and what they would read.

No program can tell an encoding for certain: the bytes of a Chinese text are letters of Latin-1 as
well. So a reader names each that decodes all of the bytes, with what it makes of them, and takes
none by itself.
"""

from __future__ import annotations

import codecs
import re

from zerotrain.config.image_source import UTF_8

CANDIDATES = (UTF_8, "gbk", "cp932", "cp949", "big5", "latin-1", "cp1252")
"""Of systems in Chinese, Japanese, Korean and languages of Western Europe."""
SHOWN = 16
"""Letters of a text in messages."""


class WrongEncodingError(ValueError):
    """Bytes that are not of the encoding; the text names it, the byte and its position.

    Attributes:
        readings: What other encodings would read, as a part of a sentence; empty if none decodes.
        first: The first encoding that decodes the bytes.
    """

    def __init__(self, error: UnicodeDecodeError, encoding: str, start: int) -> None:
        byte, at = error.object[error.start], start + error.start
        super().__init__(f"not {display_name(encoding)} (byte 0x{byte:02x} at position {at})")
        readings = find_readings(error.object)
        self.first = next(iter(readings), None)
        self.readings = ", ".join(f"{name} would read {text!r}" for name, text in readings.items())


def decode_text(content: bytes, encoding: str = UTF_8, start: int = 0) -> str:
    """Decode a text, or a part of one; one that begins with the mark of UTF-8 is UTF-8.

    Args:
        content: The bytes.
        encoding: What they are in.
        start: Their position in the text, for messages.

    Raises:
        WrongEncodingError: they are not in this encoding.
    """
    if start == 0 and content.startswith(codecs.BOM_UTF8):
        encoding = "utf-8-sig"
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        raise WrongEncodingError(error, encoding, start) from error


def find_readings(content: bytes) -> dict[str, str]:
    """Return the first letters that are not ASCII with those around them, by the encoding.

    cp1252 has all printable letters of Latin-1, and is named for those that it adds.
    """
    readings: dict[str, str] = {}
    for name in CANDIDATES:
        try:
            text = content.decode(name)
        except UnicodeDecodeError:
            continue
        letters = text.translate(dict.fromkeys(map(ord, "\t\r\n")))
        if letters.isprintable() and not (name == "cp1252" and "latin-1" in readings):
            found = re.search(r"[^\0-\x7f]", text)
            at = max(0, (found.start() if found else 0) - SHOWN // 2)
            readings[name] = " ".join(text[at : at + SHOWN].split())
    return readings


def is_utf8_as_well(text: str, encoding: str) -> bool:
    """Return whether the bytes of a text in another encoding are one in UTF-8."""
    if encoding == UTF_8 or text.isascii():
        return False
    try:
        text.encode(encoding).decode(UTF_8)
    except UnicodeError:
        return False
    return True


def display_name(encoding: str) -> str:
    """Return an encoding's name for messages."""
    return "UTF-8" if encoding in (UTF_8, "utf-8-sig") else encoding
