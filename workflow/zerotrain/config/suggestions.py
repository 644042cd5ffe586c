"""Lists of names in messages, and near names for an unknown one, in one wording for all."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

LONGEST_NAME = 200
"""Letters of a name for which near ones are looked up: the time grows with their square."""
CUTOFF = 0.6
"""Least similarity, from 0 to 1: difflib's own default, which takes one wrong letter of three."""


def nearest(
    name: object,
    known: Iterable[str],
    *,
    most: int = 1,
    cutoff: float = CUTOFF,
    margin: float = 1.0,
) -> list[str]:
    """List the known names that are most like a name, in any case, the nearest first.

    Args:
        name: What was found.
        known: The names that there are.
        most: How many to list.
        cutoff: Least similarity, from 0 to 1.
        margin: How much less similar than the nearest the others may be.
    """
    written = str(name).casefold()
    if len(written) > LONGEST_NAME:
        return []
    spellings: dict[str, str] = {}
    for one in known:
        spellings.setdefault(one.casefold(), one)
    near = difflib.get_close_matches(written, spellings, n=most, cutoff=cutoff)
    ratios = [difflib.SequenceMatcher(None, one, written).ratio() for one in near]
    return [
        spellings[one]
        for one, ratio in zip(near, ratios, strict=True)
        if ratio > ratios[0] - margin
    ]


def did_you_mean(name: object, known: Iterable[str], *, most: int = 1) -> str:
    """Return "did you mean NAME?" with the nearest known names; empty where none is near."""
    near = nearest(name, known, most=most)
    return f"did you mean {' or '.join(near)}?" if near else ""


def known_names(name: object, known: Iterable[str], what: str) -> str:
    """Return the hint for an unknown name: the nearest one, and all there are.

    Args:
        name: What was found.
        known: The names that there are.
        what: What they are, in the plural: "phases".
    """
    names = list(known)
    return after_question(name, names, f"{what}: {', '.join(names) or 'none'}")


def after_question(name: object, known: Iterable[str], sentence: str) -> str:
    """Return the sentence, after "did you mean NAME?" where a known name is near."""
    return f"{did_you_mean(name, known)} {sentence}".lstrip()


def join_first(names: Sequence[str], limit: int = 8) -> str:
    """Join the first names of a list, and say how many more there are."""
    more = f" and {len(names) - limit:,} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more if names else "nothing"
