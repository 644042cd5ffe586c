"""The built-in task of causal language models: sums of two numbers of two digits.

Every sum is asked once. What is held out can be answered only by a model that has learned to add.
"""

from __future__ import annotations

from collections.abc import Iterator

from zerotrain.data.conversation import Message

NUMBERS = range(10, 100)


def examples() -> Iterator[list[Message]]:
    """A question and its answer for each pair of numbers."""
    for a in NUMBERS:
        for b in NUMBERS:
            yield [Message("user", f"{a}+{b}="), Message("assistant", str(a + b))]
