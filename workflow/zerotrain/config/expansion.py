"""Refusal of YAML that is small as a text and large as values: aliases of aliases, deep nesting.

A reader builds such values in a moment, and everything that walks through them then takes hours.
"""

from __future__ import annotations

import re

import yaml

from zerotrain.errors import PipelineError

MOST_VALUES = 100_000
"""More than any configuration of this or of another program has; they have some hundreds."""
DEEPEST = 50
"""More levels than any has; Python's own limit is at some hundreds."""


def check_expansion(text: str, source: str) -> None:
    """Check that a YAML or JSON text holds no more values than a configuration could.

    The parser's events are counted, and nothing is built. What is no YAML at all is left to the
    reader's own message.

    Args:
        text: The text, whose length the caller has limited.
        source: What the message calls it.

    Raises:
        PipelineError: an alias repeats too much or contains itself, or the nesting is too deep.
    """
    sizes: dict[str, int] = {}  # of the values under each anchor
    open_values: list[tuple[str | None, int]] = []  # anchor, and the count at its begin
    count = 0
    try:
        for event in yaml.parse(text, Loader=yaml.CSafeLoader):
            if isinstance(event, yaml.AliasEvent):
                if event.anchor in {anchor for anchor, _ in open_values}:
                    raise _refused(source, f"the alias *{event.anchor} contains itself")
                count += sizes.get(str(event.anchor), 1)
            elif isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
                open_values.append((event.anchor, count))
                count += 1
                if len(open_values) > DEEPEST:
                    raise _refused(source, f"its values are nested more than {DEEPEST} deep")
            elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
                anchor, begin = open_values.pop()
                if anchor is not None:
                    sizes[anchor] = count - begin
            elif isinstance(event, yaml.ScalarEvent):
                count += 1
                if event.anchor is not None:
                    sizes[event.anchor] = 1
            if count > MOST_VALUES:
                cause = "its aliases repeat" if sizes else "it has"
                raise _refused(source, f"{cause} more than {MOST_VALUES:,} values")
    except (yaml.YAMLError, ValueError):
        return


def check_nesting(text: str, source: str) -> None:
    """Check that the brackets of a TOML or JSON text do not nest deeper than a reader can follow.

    Raises:
        PipelineError: the nesting is too deep.
    """
    deep = 0
    for bracket in re.findall(r"[\[\]{}]", text):
        deep += 1 if bracket in "[{" else -1
        if deep > DEEPEST:
            raise _refused(source, f"its values are nested more than {DEEPEST} deep")


def _refused(source: str, why: str) -> PipelineError:
    return PipelineError(
        f"{source}: {why}", hint="no configuration is like that; do not use this file"
    )
