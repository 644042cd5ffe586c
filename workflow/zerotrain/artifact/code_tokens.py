"""A source file as tokens: the same text in every version of Python, and after edits that change no
code.

Comments, docstrings, blank lines, line breaks within brackets and the width of indentation are
omitted. A syntax tree is unsuitable: its dump differs between versions of Python.
"""

from __future__ import annotations

import io
import tokenize
from collections.abc import Iterator
from typing import NamedTuple

LAYOUT = (tokenize.NL, tokenize.COMMENT, tokenize.ENDMARKER)
MARKS = {tokenize.NEWLINE: "\n", tokenize.INDENT: "\n{", tokenize.DEDENT: "\n}"}
"""Replacements for tokens whose text is layout."""
DEFINING = ("def", "async", "class", "rule", "checkpoint")
"""First words of lines that a docstring may follow, including Snakemake's."""


class Token(NamedTuple):
    """A token without its position."""

    kind: int
    text: str


def code_text(source: str) -> str:
    """Join the tokens of a source file or rule file.

    Args:
        source: The file's text.

    Returns:
        A text that is equal for equal code, on Python 3.11 and newer.

    Raises:
        SyntaxError: the text cannot be tokenised, for example because of an open bracket.
    """
    try:
        tokens = list(_tokens(source))
    except tokenize.TokenError as error:
        raise SyntaxError(str(error)) from error
    return "\n".join(text for line in _without_docstrings(tokens) for text in line)


def _tokens(source: str) -> Iterator[Token]:
    """Yield the tokens, each f-string as one: from Python 3.12 it is split into several."""
    lines = source.splitlines(keepends=True)
    starts = getattr(tokenize, "FSTRING_START", None), getattr(tokenize, "TSTRING_START", None)
    ends = getattr(tokenize, "FSTRING_END", None), getattr(tokenize, "TSTRING_END", None)
    depth, begin = 0, (0, 0)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in starts:
            begin = begin if depth else token.start
            depth += 1
        elif token.type in ends:
            depth -= 1
            if not depth:
                yield Token(tokenize.STRING, _between(lines, begin, token.end))
        elif not depth and token.type not in LAYOUT:
            yield Token(token.type, MARKS.get(token.type, token.string))


def _between(lines: list[str], begin: tuple[int, int], end: tuple[int, int]) -> str:
    first, last = begin[0] - 1, end[0] - 1
    if first == last:
        return lines[first][begin[1] : end[1]]
    return "".join([lines[first][begin[1] :], *lines[first + 1 : last], lines[last][: end[1]]])


def _without_docstrings(tokens: list[Token]) -> Iterator[list[str]]:
    """Split into logical lines, without those that consist only of a string.

    A string that follows `shell:` in a rule file is code.
    """
    line: list[Token] = []
    opened_by = ""
    for token in tokens:
        if token.kind in (tokenize.INDENT, tokenize.DEDENT):
            yield [token.text]
            continue
        line.append(token)
        if token.kind != tokenize.NEWLINE:
            continue
        words = [one.text for one in line]
        alone = all(one.kind == tokenize.STRING for one in line[:-1])
        if not (alone and opened_by in ("", *DEFINING)):
            yield words
            opened_by = words[0] if words[-2:-1] == [":"] else ""
        line = []
    if line:
        yield [one.text for one in line]
