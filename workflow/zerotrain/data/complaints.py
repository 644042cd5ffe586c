"""The built-in task of seq2seq language models: whether a message is a complaint, as a word.

Sentences are composed of parts. Their label is no matter of one word: "was broken" is a complaint,
"was not broken" is none, and "was not on time" is one. Held-out sentences are compositions that
training has not seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from zerotrain.data.conversation import Message

WHO = ("my sister", "our neighbour", "the office", "a friend of mine", "my uncle", "the school")
WHAT = ("the parcel", "the phone", "the printer", "the bus", "the soup", "the bill", "the jacket")
GOOD = ("on time", "as promised", "better than expected", "easy to use", "worth the money")
BAD = ("late again", "broken", "far too expensive", "cold and stale", "missing a part")
NEGATED = ("was", "was not", "is never", "was certainly")
NEGATIONS = ("was not", "is never")
TEMPLATE = "Message: {text} Label:"
LABELS = ("no complaint", "complaint")


def examples() -> Iterator[list[Message]]:
    """A sentence with its label for each composition."""
    for who, what, verb, quality in product(WHO, WHAT, NEGATED, (*GOOD, *BAD)):
        bad = (quality in BAD) != (verb in NEGATIONS)
        text = f"{who} says that {what} {verb} {quality}."
        asked = TEMPLATE.format(text=text)
        yield [Message("user", asked), Message("assistant", LABELS[bad])]
