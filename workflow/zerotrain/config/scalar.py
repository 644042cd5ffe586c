"""Any value as one line of YAML that every reader takes for the same; any text as one comment."""

from __future__ import annotations

import json
import math
import re
import unicodedata
from datetime import date
from functools import lru_cache
from typing import Any

import yaml

CONSTANTS = {None: "null", True: "true", False: "false"}
READ_AS_OTHERS = {"no", "yes", "on", "off", "true", "false", "null", "y", "n"}
UNSEEN = {"Cc", "Cf", "Cn", "Cs", "Zl", "Zp"}
"""Unicode's categories of what ends a line, directs a terminal or turns text around."""


def scalar(value: Any) -> str:
    """Write a value as one line of YAML.

    JSON is YAML, except for a float, which keeps a point before its exponent for readers of YAML
    1.1, and for text with characters that are not printed: line ends of other kinds than JSON's.
    """
    if isinstance(value, str):
        return _text(value)
    if value is None or isinstance(value, bool):
        return CONSTANTS[value]
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    if isinstance(value, float) and "e" in repr(value):
        mantissa, _, exponent = repr(value).partition("e")
        return f"{mantissa}{'' if '.' in mantissa else '.0'}e{exponent}"
    if isinstance(value, date):
        return str(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(scalar(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{scalar(k)}: {scalar(v)}' for k, v in value.items())}}}"
    return json.dumps(value, ensure_ascii=False)


def one_line(text: str) -> str:
    r"""Write a text so that it stays on the line of a comment: what is not seen, as \n or \u2028.

    Names of files, cells of tables and keys of other programs hold line ends, after which a reader
    would take the rest for keys.
    """
    if text.isprintable():
        return text
    return "".join(
        letter.encode("unicode_escape").decode()
        if unicodedata.category(letter) in UNSEEN
        else letter
        for letter in text
    )


@lru_cache(4096)  # a run.yaml has the same keys and reasons as the one before
def _text(text: str) -> str:
    if re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", text) and text.casefold() not in READ_AS_OTHERS:
        return text
    if text.isprintable():
        return json.dumps(text, ensure_ascii=False)
    # Most texts are printable, and the library is slow.
    written = yaml.safe_dump(text, default_style='"', width=math.inf, allow_unicode=True)
    return written.removesuffix("\n")
