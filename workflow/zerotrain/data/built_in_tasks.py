"""The built-in tasks of language models: sums of two numbers, and classification of complaints."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations_with_replacement, product

from zerotrain.data.conversation import Message

NUMBERS = range(10, 100)
WHO = ("my sister", "our neighbour", "the office", "a friend of mine", "my uncle", "the school")
WHAT = ("the parcel", "the phone", "the printer", "the bus", "the soup", "the bill", "the jacket")
GOOD = ("on time", "as promised", "better than expected", "easy to use", "worth the money")
BAD = ("late again", "broken", "far too expensive", "cold and stale", "missing a part")
NEGATED = ("was", "was not", "is never", "was certainly")
NEGATIONS = ("was not", "is never")
TEMPLATE = "Message: {text} Label:"
LABELS = ("no complaint", "complaint")


def sums() -> Iterator[list[Message]]:
    """Yield sums of two two-digit numbers, for causal models.

    Each pair is asked once, in one order: if 12+30 were held out and 30+12 trained on, a model
    could answer without having learned to add. In every second pair the larger number comes first.
    """
    for number, (a, b) in enumerate(combinations_with_replacement(NUMBERS, 2)):
        asked = f"{b}+{a}=" if number % 2 else f"{a}+{b}="
        yield [Message("user", asked), Message("assistant", str(a + b))]


def complaints() -> Iterator[list[Message]]:
    """Yield sentences labelled as complaints or not, for seq2seq models.

    No single word decides: "was broken" is a complaint, "was not broken" is not, and "was not on
    time" is. Held-out sentences are combinations that training has not seen.
    """
    for who, what, verb, quality in product(WHO, WHAT, NEGATED, (*GOOD, *BAD)):
        bad = (quality in BAD) != (verb in NEGATIONS)
        text = f"{who} says that {what} {verb} {quality}."
        asked = TEMPLATE.format(text=text)
        yield [Message("user", asked), Message("assistant", LABELS[bad])]
