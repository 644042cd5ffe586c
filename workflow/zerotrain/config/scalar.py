"""Values as YAML that every reader takes for the same: any as one line, sections as several."""

from __future__ import annotations

import json
import math
import re
import textwrap
import unicodedata
from collections.abc import Mapping
from datetime import date
from functools import lru_cache
from typing import Any

import yaml

CONSTANTS = {None: "null", True: "true", False: "false"}
WORD = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
"""What a text may be without quotes in files that programs write."""
PATH = re.compile(r"[A-Za-z/][\w./-]*")
"""And in those that a person edits: names and paths, too."""
NO_COMMENTS: Mapping[str, str] = {}
WIDTH = 100
"""Of comments."""
READ_AS_OTHERS = {"no", "yes", "on", "off", "true", "false", "null", "y", "n"}
UNSEEN = {"Cc", "Cf", "Cn", "Cs", "Zl", "Zp"}
"""Unicode's categories of what ends a line, directs a terminal or turns text around."""


def scalar(value: Any, plain: re.Pattern[str] = WORD) -> str:
    """Write a value as one line of YAML; a text is in quotes unless it is `plain`.

    JSON is YAML, except for a float, which keeps a point before its exponent for readers of YAML
    1.1, and for text with characters that are not printed: line ends of other kinds than JSON's.
    """
    if isinstance(value, str):
        return _text(value, plain)
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
        return f"[{', '.join(scalar(item, plain) for item in value)}]"
    if isinstance(value, dict):
        pairs = [f"{scalar(key, plain)}: {scalar(one, plain)}" for key, one in value.items()]
        return f"{{{', '.join(pairs)}}}"
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


def key_lines(
    key: str,
    value: Any,
    because: Mapping[str, str] = NO_COMMENTS,
    *,
    indent: str = "",
    plain: re.Pattern[str] = WORD,
    above: str = "",
) -> list[str]:
    """Write a key and its value; a section and a list of sections have a line for each key.

    Args:
        key: The key.
        value: Its value.
        because: Comments, by dotted keys: behind a value where they fit, else above it. A section
            of a section that has one, be it empty, is written as one value.
        indent: What each line begins with.
        plain: What texts need no quotes.
        above: The section's dotted key, with a dot.
    """
    path, name = f"{above}{key}", f"{indent}{scalar(key, plain)}:"
    reason = because.get(path, "")
    if isinstance(value, dict) and value and not (above and path in because):
        return [name, *_section(value, because, f"{indent}  ", plain, f"{path}.")]
    if isinstance(value, list) and value and all(isinstance(one, dict) and one for one in value):
        lines = [*comment(reason, indent), name]
        for number, one in enumerate(value):
            first, *rest = _section(one, because, f"{indent}    ", plain, f"{path}.{number}.")
            lines += [f"{indent}  - {first.lstrip()}", *rest]
        return lines
    line = f"{name} {scalar(value, plain)}"
    if reason and len(line) + len(reason) + 3 > WIDTH:
        return [*comment(reason, indent), line]
    return [f"{line} # {one_line(reason)}" if reason else line]


def _section(
    values: Mapping[str, Any],
    because: Mapping[str, str],
    indent: str,
    plain: re.Pattern[str],
    above: str,
) -> list[str]:
    return [
        line
        for key, value in values.items()
        for line in key_lines(key, value, because, indent=indent, plain=plain, above=above)
    ]


def comment(text: str, indent: str = "") -> list[str]:
    """Write a text as the lines of a comment."""
    start = f"{indent}# "
    return textwrap.wrap(
        one_line(text),
        WIDTH,
        initial_indent=start,
        subsequent_indent=start,
        break_long_words=False,
        break_on_hyphens=False,
    )


@lru_cache(4096)  # a run.yaml has the same keys and reasons as the one before
def _text(text: str, plain: re.Pattern[str]) -> str:
    if plain.fullmatch(text) and text.casefold() not in READ_AS_OTHERS:
        return text
    if text.isprintable():
        return json.dumps(text, ensure_ascii=False)
    # Most texts are printable, and the library is slow.
    written = yaml.safe_dump(text, default_style='"', width=math.inf, allow_unicode=True)
    return written.removesuffix("\n")
