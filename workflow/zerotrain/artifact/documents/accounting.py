"""Accounting of names: which keys of a mapping a reader used, which are irrelevant, what is left.

A reader of a foreign document marks what it uses. What is left over was written for some purpose
that the reader does not serve, so it is named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

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
