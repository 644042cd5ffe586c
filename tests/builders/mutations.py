"""Mutations of files: another value, a missing or a further key, cut or changed bytes."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

ODD_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 10**30, 1e308, float("nan"), "", "x", "\x1b[2J", [], {}, [None], {"x": []},
    [[[]]], "../../x", "9" * 5000,
)  # fmt: skip
"""Values that a reader does not expect in place of its own."""


def mutated_values(document: Any, count: int, seed: int = 0) -> Iterator[Any]:
    """Yield copies of a JSON value, each with one mutation at a random place."""
    draw = random.Random(seed)
    for _ in range(count):
        changed = copy.deepcopy(document)
        holder, key = draw.choice(list(_places(changed)))
        action = draw.randrange(4)
        if action == 0:
            del holder[key]
        elif action == 1 and isinstance(holder, dict):
            holder[draw.choice(["x", "", "\x1b", "0"])] = draw.choice(ODD_VALUES)
        else:
            holder[key] = draw.choice(ODD_VALUES)
        yield changed
    yield from (copy.deepcopy(one) for one in ODD_VALUES)


def mutated_bytes(content: bytes, count: int, seed: int = 0) -> Iterator[bytes]:
    """Yield copies of a file's content: cut, or with some bytes replaced, repeated or inserted."""
    draw = random.Random(seed)
    for _ in range(count):
        place, size = draw.randrange(len(content)), draw.choice((1, 2, 8, 64))
        noise = draw.choice((bytes(size), b"\xff" * size, b"{[" * size, b"&a *a : - ", b"\n\n\t"))
        yield draw.choice(
            (
                content[:place],
                content[:place] + noise + content[place + size :],
                content[:place] + content[place : place + size] * 3 + content[place + size :],
                content[:place] + noise + content[place:],
            )
        )


def dumped(document: Any) -> bytes:
    """Return a JSON value as a file has it; numbers that are not finite stay."""
    return json.dumps(document).encode()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inside in list(items):
        yield value, key
        if isinstance(inside, dict | list):
            yield from _places(inside)
