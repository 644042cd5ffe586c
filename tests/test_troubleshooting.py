"""docs/troubleshooting.md is headed by the messages that the program prints, word for word."""

from __future__ import annotations

import ast
import difflib
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "workflow" / "zerotrain"
PAGE = ROOT / "docs" / "troubleshooting.md"
PLACE = "<>"
LEAST_WORDS = 12
"""Letters of its own that a heading needs: a shorter one would be found anywhere."""
NAMED = {
    "Crash on resume with offload": "swap files of a training that has died",
    "unsupported optimizer": "<key>: <what is expected>",
    "DeepSpeed is not supported on this platform": "DeepSpeed does not run on",
    "Enabling or disabling DeepSpeed on an existing checkpoint": "trained under another launch",
    "A validation error": "unknown key",
    "An EMA is one more copy": "averaged weights",
    "LoRA trains under every preset": "trained adapter",
    "libaio-dev": "NVMe offload needs libaio",
    "The GPU. In this order": "the device ran out of memory",
}
"""Problems that the guides of other programs name, and the heading that each stands under."""


def headings() -> list[tuple[int, str]]:
    """Line and message of each entry."""
    lines = PAGE.read_text().splitlines()
    found = [(n, re.fullmatch(r"### `(.+)`", line)) for n, line in enumerate(lines, 1)]
    assert len([line for line in lines if line.startswith("### ")]) == sum(1 for _, m in found if m)
    return [(number, match[1]) for number, match in found if match]


@cache
def templates() -> dict[str, str]:
    """Every text of the package, values in it as <>, with the place it stands at."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if text := _template(node):
                found[" ".join(text.split())] = f"{path.relative_to(ROOT)}:{node.lineno}"  # type: ignore[attr-defined]
    return found


def _template(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(_template(part) or PLACE for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (_template(node.left) or PLACE) + (_template(node.right) or PLACE)
    return None


@pytest.mark.parametrize(("line", "heading"), headings(), ids=lambda value: str(value)[:60])
def test_a_heading_is_a_message_of_the_program(line: int, heading: str) -> None:
    """A changed message is to be changed there as well."""
    wanted = re.sub(r"<[^>]*>", PLACE, heading)
    if len(wanted.replace(PLACE, "")) < LEAST_WORDS:
        assert wanted in templates(), f"{PAGE}:{line}: so short a message must be a whole one"
    if not any(wanted in text for text in templates()):
        near = difflib.get_close_matches(wanted, templates(), n=1, cutoff=0.3)
        place = f"{templates()[near[0]]} has: {near[0]}" if near else "nothing is like it"
        pytest.fail(f"docs/troubleshooting.md:{line}: no message reads `{heading}`; {place}")


def test_the_problems_that_other_guides_name_are_there() -> None:
    """Each under a message of ours."""
    entries = {part.splitlines()[0]: part for part in PAGE.read_text().split("\n### ")[1:]}
    for words, heading in NAMED.items():
        texts = [text for head, text in entries.items() if heading in head]
        assert len(texts) == 1, heading
        assert words in " ".join(texts[0].split()), words


def test_a_message_stands_once() -> None:
    """Two entries of one heading would contradict each other some day."""
    found = [heading for _, heading in headings()]
    assert len(set(found)) == len(found)
    assert len(found) >= 25
