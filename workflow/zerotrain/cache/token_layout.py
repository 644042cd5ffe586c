"""The format of a text dataset's cache: its index, and rows of conversations' tokens.

Tokens are stored once per conversation. A row of the index is one training sample: a conversation,
or several concatenated ones if rows are packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from zerotrain.artifact.columns import Columns
from zerotrain.cache.layout import (
    INDEX,
    Series,
    parse_series,
    read_document,
    take_records,
    write_records,
)

TOKENS = "tokens"
"""The only series of shards."""


@dataclass(frozen=True)
class Row:
    """One training sample."""

    keys: tuple[str, ...]
    """Keys of its conversations, in order."""
    split: Literal["train", "holdout"]
    sha256: str = ""
    """Digest of a held-out row's conversation, by which a subset is chosen."""


@dataclass(frozen=True)
class TokenIndex:
    """The content of an index."""

    max_length: int
    packing: bool
    repeats: int
    """How often an epoch sees each row of the train split."""
    rows: Sequence[Row]
    tokens: Series


def pack(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Pack conversations into rows of at most max_length tokens by "best fit decreasing".

    Johnson, "Near-optimal bin packing algorithms" (1973). Rows, and conversations within them, are
    in the order of their first members.

    Returns:
        The positions of each row's conversations.
    """
    rows: list[list[int]] = []
    room: list[list[int]] = [[] for _ in range(max_length + 1)]
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        left = next((n for n in range(lengths[i], max_length + 1) if room[n]), None)
        if left is None:
            rows.append([])
            left, number = max_length, len(rows) - 1
        else:
            number = room[left].pop()
        rows[number].append(i)
        room[left - lengths[i]].append(number)
    return sorted(sorted(row) for row in rows)


def write_token_index(folder: Path, index: TokenIndex) -> None:
    """Write index.json and index.arrow."""
    head = asdict(replace(index, rows=()))
    del head["rows"]
    write_records(folder, head, Columns.of(Row, index.rows))


def read_token_index(folder: Path) -> TokenIndex:
    """Read an index.

    Raises:
        OSError: a file is missing.
        ValueError: it is not an index of this format.
    """

    def parse(found: dict[str, Any]) -> TokenIndex:
        rows = take_records(folder, found, Row)
        return TokenIndex(**{**found, "rows": rows, TOKENS: parse_series(found[TOKENS])})

    return read_document(folder / INDEX, parse)
