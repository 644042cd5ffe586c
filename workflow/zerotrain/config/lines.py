"""Where a key is in a configuration file; the file is read again for messages alone."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

Location = Sequence[str | int]
"""Keys and places in lists, from the top: ("phases", 0, "launch")."""

SYNTAX = {
    "found a tab character": "a tab is in the indentation: indent with spaces",
    "found unhashable key": "a list or a mapping is no key: put the text in quotes",
    "while scanning for the next token": "no value begins with this character: put the text in "
    "quotes, and indent with spaces instead of tabs",
    "mapping values are not allowed": "a second `: ` in one line, or more indentation than the "
    "line above allows: put a text that holds `: ` in quotes",
    "could not find expected ':'": "a key without `:` in this line or the one above",
    "found unexpected end of stream": "a quote is opened and not closed",
    "expected ',' or ']'": "a list is opened with [ and not closed, or an entry has no comma",
    "expected ',' or '}'": "a mapping is opened with { and not closed, or an entry has no comma",
    "did not find expected '-'": "a list ends here and a key follows with the same indentation",
    "did not find expected key": "the indentation is not that of the lines above",
    "found undefined alias": "a value that begins with * is YAML's alias: put the text in quotes",
    "found unknown escape character": 'a \\ in "double quotes" begins an escape: use single quotes',
}
"""Our words for what YAML's readers say, by a part of theirs; the first that fits is taken."""
DOUBLED = re.compile(r'found duplicate key "([^"]*)"')


def describe_syntax_error(error: Exception) -> str:
    """Return line, column and cause of a text that is no YAML, as a part of a sentence."""
    if isinstance(error, UnicodeDecodeError):
        return f"not valid YAML: byte {error.start + 1} is not UTF-8: save the file as UTF-8"
    if not isinstance(error, MarkedYAMLError):  # as a date that does not exist
        return f"not valid YAML: {' '.join(str(error).split())}"
    message = f"{error.context or ''} {error.problem or ''}"
    mark = error.problem_mark or error.context_mark
    at = "not valid YAML: "
    if mark:
        at += f"line {mark.line + 1}, column {mark.column + 1}: "
    if doubled := DOUBLED.search(message):
        return f"{at}the key {doubled[1]} stands twice: remove one of them"
    cause = next((ours for theirs, ours in SYNTAX.items() if theirs in message), message.strip())
    return f"{at}{cause}"


WORD = r"[a-z][a-z0-9_]*(?:\.[a-z0-9_]+)*"
"""A key in a sentence."""


class KeyLines:
    """The lines of a file's keys, 1 the first. Of a text that is no YAML, none is known."""

    def __init__(self, text: str) -> None:
        self._lines: dict[tuple[str | int, ...], int] = {}
        self._phases: dict[str, tuple[str | int, ...]] = {}
        """The place of each phase, by its name."""
        with contextlib.suppress(YAMLError, ValueError):
            self._read(YAML(typ="rt").compose(text), ())

    def at(self, location: Location) -> int | None:
        """Return the line of a key, or of the section that it is missing in.

        A phase is flat in the file, and may take a section from the run: both are tried.
        """
        for candidate in _spellings(tuple(location)):
            if (line := self._lines.get(candidate)) is not None:
                return line
        return self.at(location[:-1]) if len(location) > 1 else None

    def mentioned(self, sentence: str) -> int | None:
        """Return the line of the first key that a sentence names; None if the file has none.

        A bare key counts where one section alone has it: `packing` stands for `train.packing`.
        """
        phase = re.match(r"phase ([A-Za-z0-9_-]+): ", sentence)
        inside = self._phases.get(phase[1], ()) if phase else ()
        words = re.findall(WORD, sentence[phase.end() if phase else 0 :])
        # Words such as `run` or `data` are keys where they begin a sentence; else they are English.
        for word in [*words[:1], *(word for word in words[1:] if "_" in word or "." in word)]:
            parts = tuple(word.split("."))
            if inside and (line := self._exact((*inside, *parts))) is not None:
                return line
            if (line := self._exact(parts)) is not None:
                return line
            found = {n for c, n in self._lines.items() if len(parts) == 1 and c[-1:] == parts}
            if len(found) == 1:
                return found.pop()
        return self._lines.get(inside) if inside else None

    def _exact(self, location: tuple[str | int, ...]) -> int | None:
        return next((self._lines[c] for c in _spellings(location) if c in self._lines), None)

    def _read(self, node: Any, location: tuple[str | int, ...]) -> None:
        """Note the line of everything in a node of ruamel's tree."""
        if node is None or not isinstance(node.value, list):
            return
        for place, child in enumerate(node.value):
            key, value = child if isinstance(child, tuple) else (child, child)
            name = key.value if isinstance(child, tuple) else place
            if isinstance(name, str | int):
                self._lines[*location, name] = key.start_mark.line + 1
                if location[:1] == ("phases",) and name == "name" and len(location) == 2:
                    self._phases[str(value.value)] = location
                self._read(value, (*location, name))


def _spellings(location: tuple[str | int, ...]) -> Iterator[tuple[str | int, ...]]:
    """Yield where a file may have a key of the merged configuration, the likeliest place first."""
    yield location
    if location[:1] == ("phases",) and len(location) > 2:
        own = location[2:]
        if own[0] == "train":
            yield (*location[:2], *own[1:])
        if own == ("launch", "preset"):
            yield (*location[:2], "launch")
        if len(own) > 1:
            yield own
