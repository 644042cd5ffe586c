"""Files as people and other programs wrote them: each is read rightly, or refused by its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.inputs.try_all import INPUTS, try_input

EXPECTED = INPUTS / "expected.txt"


def test_what_becomes_of_each_input(generated: Callable[[Path, str], None]) -> None:
    """A line for each: what is read, what is left out, or why it is refused."""
    paths = sorted(INPUTS.glob("[0-9]*"))
    assert len(paths) >= 25
    generated(EXPECTED, "".join(f"{try_input(path)}\n" for path in paths))
