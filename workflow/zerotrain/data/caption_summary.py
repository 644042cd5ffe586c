"""Lengths and frequent words of captions and conversations."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median

WORD = re.compile(r"\w+(?:['’\-]\w+)*")  # noqa: RUF001
"""A word. Scripts without spaces between words give whole phrases."""
SHOWN = 12
"""Frequent words or tags that are listed."""
LEAST_TAGGED = 0.5
"""Share of captions with a comma above which captions are lists of tags."""


def count_words(text: str) -> int:
    """Count the words of a text."""
    return len(WORD.findall(text))


def describe_lengths(lengths: Sequence[int]) -> str:
    """Describe at least one length by the smallest, the largest and the median."""
    least, most = min(lengths), max(lengths)
    if least == most:
        return f"{least:,}"
    return f"{least:,} to {most:,}, median {median(lengths):,.0f}"


def frequent_words(captions: Iterable[str]) -> Counter[str]:
    """Count for each word, in lower case, the captions that have it."""
    return Counter(word for caption in captions for word in {*WORD.findall(caption.casefold())})


def frequent_tags(captions: Sequence[str]) -> Counter[str]:
    """Count for each tag the captions that have it; none if few captions are lists of tags."""
    if sum("," in caption for caption in captions) < LEAST_TAGGED * len(captions):
        return Counter()
    return Counter(
        tag
        for caption in captions
        for tag in {part.strip().casefold() for part in caption.split(",")}
        if tag
    )


def describe_frequent(counts: Counter[str]) -> str:
    """List the most frequent ones that are not alone, with their counts; equals by the alphabet."""
    ordered = sorted(counts.items(), key=lambda one: (-one[1], one[0]))
    return ", ".join(f"{name} {count:,}" for name, count in ordered[:SHOWN] if count > 1)
