"""Where a key is in a configuration file; the file is read again for messages alone."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from zerotrain.artifact.documents import DocumentError, compose_yaml

Location = Sequence[str | int]
"""Keys and places in lists, from the top: ("phases", 0, "launch")."""

WORD = r"[a-z][a-z0-9_]*(?:\.[a-z0-9_]+)*"
"""A key in a sentence."""


class KeyLines:
    """The lines of a file's keys, 1 the first. Of a text that is no YAML, none is known."""

    def __init__(self, text: str) -> None:
        self._lines: dict[tuple[str | int, ...], int] = {}
        self._phases: dict[str, tuple[str | int, ...]] = {}
        """The place of each phase, by its name."""
        with contextlib.suppress(DocumentError):
            self._read(compose_yaml(text, "the file"), ())

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
        """Note the line of everything in a node of the parser's tree."""
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
