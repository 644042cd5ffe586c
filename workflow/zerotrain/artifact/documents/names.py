"""Names in documents of others: those joined to a folder, and the keys that a reader uses.

A reader of a foreign document marks what it uses. What is left over was written for some purpose
that the reader does not serve, so it is named.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from zerotrain.artifact.documents.json_text import check_object, read_object
from zerotrain.artifact.documents.limits import DocumentError
from zerotrain.errors import PipelineError

DRIVE = re.compile(r"[A-Za-z]:")
LINE_ENDS = ("Cc", "Zl", "Zp")
"""Unicode categories of control characters and of line separators."""


def find_name_error(name: Any) -> str | None:
    """Return why a name from a file's content may not be joined to a folder.

    Args:
        name: Should be a relative path with forward slashes.

    Returns:
        The end of a sentence that starts with the name; None if the name stays in its folder.
    """
    if not isinstance(name, str):
        return "is not a string"
    if error := find_text_error(name):
        return error
    if "\\" in name:
        return "holds a backslash"
    if name.startswith("/") or DRIVE.match(name):
        return "is absolute"
    parts = name.split("/")
    if ".." in parts:
        return "leaves the folder"
    if "" in parts or "." in parts:
        return "has an empty part"
    return None


def check_name(name: Any, where: str | Path) -> str:
    """Check that a name from a file's content stays in its folder.

    Args:
        name: Should be a relative path with forward slashes.
        where: The file with the name, for the message.

    Returns:
        The name.

    Raises:
        PipelineError: it leaves the folder, or is not a name.
    """
    if error := find_name_error(name):
        raise PipelineError(
            f"{where}: the name {quote(name)} {error}",
            hint="names are relative, with forward slashes and without `..`; do not use files of "
            "which you do not know who made them",
        )
    return str(name)


def read_weight_map(index: Path) -> dict[str, str]:
    """Read which file has each tensor of a model (`model.safetensors.index.json`).

    Args:
        index: The index, in the folder of the files; it may be a link, as in the hub's cache.

    Raises:
        FileError: it is missing, or is a folder, a pipe or a device.
        DocumentError: it is not such an index.
        PipelineError: a name leaves the folder.
    """
    hint = "copy or download the folder again"
    found = read_object(index, follow_links=True, hint=hint)
    names = check_object(found.get("weight_map"), f"{index}: weight_map", hint=hint)
    if not names:
        raise DocumentError(index, "weight_map names no tensor", hint=hint)
    return {tensor: check_name(name, index) for tensor, name in names.items()}


def read_shard_names(index: Path) -> list[str]:
    """Read the names of a model's files from its index, sorted; see read_weight_map."""
    return sorted({*read_weight_map(index).values()})


def find_text_error(text: str) -> str | None:
    """Return why a text cannot be a path; None if it can be one."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return "is not valid Unicode"
    if any(unicodedata.category(letter) in LINE_ENDS for letter in text):
        return "holds a control character"
    return None


def quote(name: Any) -> str:
    """Format a hostile name on one line that is safe for a terminal."""
    return ascii(name)


MOST_NAMES, MOST_LETTERS = 20, 80
"""Names that are listed, and the letters of each."""


class Names:
    """The names of one mapping, each used, known to be irrelevant, or left over.

    Args:
        names: The names, in their order.
    """

    def __init__(self, names: Iterable[object]) -> None:
        self._left = dict.fromkeys(str(name) for name in names)

    def use(self, *names: str) -> None:
        """Mark names as used; those that the mapping does not have do not matter."""
        for name in names:
            self._left.pop(name, None)

    def ignore(self, irrelevant: Mapping[str, str]) -> dict[str, str]:
        """Mark names as irrelevant.

        Args:
            irrelevant: The reason why a name does not matter, by the name.

        Returns:
            The reasons of the names that the mapping has.
        """
        found = {name: irrelevant[name] for name in self._left if name in irrelevant}
        self.use(*found)
        return found

    def leftovers(self) -> list[str]:
        """Return the names that are neither used nor irrelevant, in their order."""
        return [*self._left]


class LeftOut:
    """The names that were left over, counted over many records of each kind.

    Args:
        counts: The numbers of an earlier count: by kind, then by name.
    """

    def __init__(self, counts: Mapping[str, Mapping[str, int]] | None = None) -> None:
        self._counts = {what: Counter(names) for what, names in (counts or {}).items()}

    def add(self, what: str, names: Iterable[str], records: int = 1) -> None:
        """Count names of a record, or of equal records.

        Args:
            what: The kind of record, in the singular.
            names: What is left over of it.
            records: The number of such records.
        """
        for name in names:
            shown = name[:MOST_LETTERS].encode("utf-8", "backslashreplace").decode()
            self._counts.setdefault(what, Counter())[shown] += records

    def update(self, other: LeftOut) -> None:
        """Add the counts of another count."""
        for what, names in other._counts.items():
            self._counts.setdefault(what, Counter()).update(names)

    def counts(self) -> dict[str, dict[str, int]]:
        """Return the numbers by kind and name, both sorted; empty if nothing is left out."""
        return {what: dict(sorted(names.items())) for what, names in sorted(self._counts.items())}

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield each name with its number of records, such as `key foo` and `12 turns`.

        Of many names, those of most records are listed and the others counted.
        """
        for what, names in self.counts().items():
            listed = sorted(names.items(), key=lambda one: (-one[1], one[0]))
            for name, count in listed[:MOST_NAMES]:
                yield f"key {name}", f"{count:,} {what}{'s' * (count != 1)}"
            if more := len(listed[MOST_NAMES:]):
                yield f"{more:,} further key{'s' * (more != 1)}", f"{what}s"

    def lines(self) -> list[str]:
        """Return a line for each name, such as `left out: key foo of 12 turns`."""
        return [f"left out: {name} of {records}" for name, records in self.rows()]
