"""Undo the split of a phase in a configuration's text that has been edited since."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher
from itertools import pairwise

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from zerotrain.config.edit import Split, split_values


def undo_split(former: str, text: str, now: str, split: Split) -> str | None:
    """Undo a split in a configuration's text that has been edited since.

    Args:
        former: The text before the split.
        text: The text after it.
        now: The text after the edits.
        split: What was split.

    Returns:
        The text with the edits and without the split; None where both changed the same lines, or
        the result would mean something else.
    """
    undone = _merge(text, former, now)
    if undone is None:
        return None
    try:
        means = YAML(typ="safe").load(now)
        same = split_values(YAML(typ="safe").load(undone), split) == means
    except (LookupError, StopIteration, TypeError, ValueError, YAMLError):
        return None
    return undone if same else None


def _merge(base: str, one: str, other: str) -> str | None:
    """Apply the changes of lines from a text to each of two others; None where they overlap."""
    lines = base.splitlines(keepends=True)
    changes = sorted(
        {*_changed_lines(lines, one), *_changed_lines(lines, other)}, key=lambda change: change[:2]
    )
    for (start, stop, _), (following, end, _) in pairwise(changes):
        if following < stop or (start, stop) == (following, end):
            return None
    for start, stop, new in reversed(changes):
        lines[start:stop] = new
    return "".join(lines)


def _changed_lines(lines: Sequence[str], text: str) -> list[tuple[int, int, tuple[str, ...]]]:
    new = text.splitlines(keepends=True)
    codes = SequenceMatcher(None, lines, new, autojunk=False).get_opcodes()
    return [(a, b, tuple(new[c:d])) for tag, a, b, c, d in codes if tag != "equal"]
