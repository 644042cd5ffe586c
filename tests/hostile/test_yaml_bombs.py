"""A few bytes of YAML that stand for billions of values, or for more levels than a stack has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from zerotrain.artifact.documents import parse_yaml
from zerotrain.artifact.documents.limits import MOST_LEVELS, MOST_VALUES
from zerotrain.artifact.layout import run_of
from zerotrain.config.read import read_config
from zerotrain.errors import PipelineError
from zerotrain.importers import files
from zerotrain.launch.preset import read_preset

BOMB = "".join(
    f"{letter}: &{letter} [{', '.join([f'*{before}' if before else 'x'] * 9)}]\n"
    for before, letter in zip(["", *"abcdefgh"], "abcdefghi", strict=True)
)
"""Nine lists, each of nine times the one before."""
TOO_MANY = f"aliases repeat more than {MOST_VALUES:,} values"
INSIDE = r"the alias \*a contains itself"
TOO_DEEP = f"nested more than {MOST_LEVELS} deep"


@pytest.mark.parametrize("read", [read_config, read_preset, files.load_yaml])
@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (f"{BOMB}run: *i\n", TOO_MANY),
        ("run: r\na: &a [1, *a]\n", INSIDE),
        ("run: r\na: &a {b: *a}\n", INSIDE),
        (f"run: {'[' * 100_000}{']' * 100_000}\n", TOO_DEEP),
        (f"run:\n  {'- ' * 100_000}x\n", TOO_DEEP),
    ],
    ids=["many", "list", "section", "brackets", "dashes"],
)
def test_a_yaml_bomb_is_one_sentence(
    read: Callable[[Path], object], text: str, cause: str, tmp_path: Path
) -> None:
    """With the file; also where only the name of the run is looked for."""
    file = tmp_path / "bomb.yaml"
    file.write_text(text)
    with pytest.raises(PipelineError, match=cause) as refused:
        read(file)
    assert str(file) in refused.value.what
    assert run_of(file) is None


def test_what_aliases_and_brackets_are_for_is_read() -> None:
    """A section that several phases share, merged keys, and brackets in a prompt."""
    section = {"x": 1, "y": [2, 3]}
    assert parse_yaml(
        "a: &a {x: 1, y: [2, 3]}\nb: *a\nc: {<<: *a, x: 4}\nd: '[[[cat]]]'\n", "a"
    ) == {
        "a": section,
        "b": section,
        "c": {"x": 4, "y": [2, 3]},
        "d": "[[[cat]]]",
    }
