"""The format of a text dataset's cache: index.json, and rows made of conversations' tokens.

Tokens are stored once for each conversation. A row of the index is what training reads as one
sample: a conversation, or several of them one after another where rows are packed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from zerotrain.artifact import digest, write_json
from zerotrain.cache.layout import FORMAT, INDEX, Series, parse_series

TOKENS = "tokens"
"""The one series of shards."""


@dataclass(frozen=True)
class Row:
    """One training sample."""

    keys: tuple[str, ...]
    """Those of its conversations, in order."""
    split: Literal["train", "holdout"]
    sha256: str = ""
    """Digest of its one conversation, where it is held out: by it some of many are chosen."""


@dataclass(frozen=True)
class TokenIndex:
    """What index.json says."""

    max_length: int
    packing: bool
    repeats: int
    """How often an epoch sees each row of the train split."""
    rows: tuple[Row, ...]
    tokens: Series


def tokens_key(
    sha256: str, max_length: int, *, family: str, parts: Mapping[str, str], code: str
) -> str:
    """Key of a conversation's tokens.

    Args:
        sha256: Digest of the conversation.
        max_length: Where tokens are cut.
        family: Decides what is read and what is learned.
        parts: Digests of the tokenizer's files.
        code: Digest of the code that tokenises.
    """
    return digest([TOKENS, FORMAT, sha256, max_length, family, dict(parts), code])


def pack(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Conversations in as few rows as "best fit decreasing" finds, each of max_length at most.

    Johnson, "Near-optimal bin packing algorithms" (1973). Rows, and conversations within them,
    come in the order of their first members.

    Returns:
        The positions of the conversations of each row.
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
    """Write index.json."""
    write_json(folder / INDEX, {"format": FORMAT, **asdict(index)})


def read_token_index(folder: Path) -> TokenIndex:
    """Read index.json.

    Raises:
        OSError: there is none.
        ValueError: it is no index of this format.
    """
    found: dict[str, Any] = json.loads((folder / INDEX).read_text())
    try:
        if found.pop("format") != FORMAT:
            raise ValueError(f"{folder / INDEX}: not an index of format {FORMAT}")
        return TokenIndex(
            **{
                **found,
                "rows": tuple(Row(**{**row, "keys": tuple(row["keys"])}) for row in found["rows"]),
                TOKENS: parse_series(found[TOKENS]),
            }
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{folder / INDEX}: {error}") from error
