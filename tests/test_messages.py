"""A message can be read: whatever is in it, it is short, and no terminal acts on it."""

from __future__ import annotations

import pytest

from zerotrain.errors import PipelineError

PATH = "/home/somebody/" + "/".join(f"folder-{number}" for number in range(30))


@pytest.mark.parametrize(
    "what",
    [
        "x" * 100_000,
        "key: " + repr(["value"] * 10_000),
        "\n".join(f"line {number}: unknown key" for number in range(5_000)),
        "\x1b[2J" * 10_000,
        "\n".join(["a word " * 50] * 4),
    ],
    ids=["letters", "list", "lines", "controls", "long lines"],
)
@pytest.mark.parametrize("hint", ["do this", "do this " * 24, "do this " * 1_000, "\u202e" * 5_000])
def test_no_message_is_longer_than_a_screen(what: str, hint: str) -> None:
    """1,000 letters with both headings."""
    assert len(str(PipelineError(what, hint=hint))) <= 1_000


def test_a_long_value_is_cut_in_its_middle() -> None:
    """Its ends, the key and what is right stay."""
    error = PipelineError(f"a.yaml: run: must be short (found 'A{'x' * 9_000}Z')", hint="cut it")
    assert error.what.startswith("a.yaml: run: must be short (found 'Axxx")
    assert error.what.endswith("xxxZ')")
    assert " ... " in error.what
    assert len(error.what) < 300


def test_ordinary_messages_are_whole() -> None:
    """A long path can be pasted, and so can a command in a hint."""
    error = PipelineError(f"{PATH}/a.yaml: no such file", hint=f"call `zerotrain new {PATH}`")
    assert str(error) == (
        f"ERROR: {PATH}/a.yaml: no such file\n  Hint: call `zerotrain new {PATH}`"
    )


def test_how_many_lines_are_left_out_is_said() -> None:
    """The first ones are those to correct first."""
    lines = [f"key{number}: unknown" for number in range(500)]
    shown = PipelineError("\n".join(lines), hint="x").what.split("\n")
    assert shown[:-1] == lines[: len(shown) - 1]
    assert shown[-1] == f"  ... and {500 - len(shown) + 1} more lines"


@pytest.mark.parametrize("mark", ["\u202e", "\u2066", "\u200f", "\x9b", "\x1b"])
def test_marks_that_change_what_a_terminal_shows_are_escaped(mark: str) -> None:
    """A name that is turned around would show another command in a hint."""
    error = PipelineError(f"a{mark}b", hint=f"c{mark}d")
    assert mark not in error.what + error.hint + str(error)
    assert ascii(mark)[1:-1] in error.what
