"""The built-in task of causal language models: sums of two numbers of two digits.

Each pair is asked once, in one order: were 12+30 held out and 30+12 learned, a model could answer
without having learned to add.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations_with_replacement

from zerotrain.data.conversation import Message

NUMBERS = range(10, 100)


def examples() -> Iterator[list[Message]]:
    """A question and its answer for each pair; the larger number comes first in every other one."""
    for number, (a, b) in enumerate(combinations_with_replacement(NUMBERS, 2)):
        asked = f"{b}+{a}=" if number % 2 else f"{a}+{b}="
        yield [Message("user", asked), Message("assistant", str(a + b))]
