"""YAML of others: refused if it is small as a text and large as values.

Aliases of aliases and deep nesting are built in a moment, and everything that copies, checks or
prints the values then takes hours, or all memory.
"""

from __future__ import annotations

import re
from typing import Any

import yaml
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from zerotrain.errors import PipelineError

MOST_VALUES = 100_000
"""More than any configuration of this or of another program has; they have some hundreds."""
MOST_LEVELS = 50
"""More levels of lists and sections than any has; Python's own limit is at some hundreds."""
BRACKET = re.compile(r"[\[\]{}]")


class TooMuchYAMLError(YAMLError):
    """More than a person would write; readers report it as they do a syntax error."""


def load_yaml(text: str) -> Any:
    """Read YAML 1.2.

    Raises:
        YAMLError: it is not YAML, or is nested too deeply, or its aliases repeat too much.
    """
    _count_values(text)
    return YAML(typ="safe").load(text)


def check_expansion(text: str, source: str) -> None:
    """Check that a YAML text holds no more values than a configuration could.

    What is no YAML at all is left to the reader's own message.

    Args:
        text: The text, whose length the caller has limited.
        source: What the message calls it.

    Raises:
        PipelineError: an alias repeats too much or contains itself, or the nesting is too deep.
    """
    try:
        _count_values(text)
    except TooMuchYAMLError as error:
        raise _refused(source, str(error)) from error


def check_nesting(text: str, source: str) -> None:
    """Check that the brackets of a TOML or JSON text do not nest deeper than a reader can follow.

    Raises:
        PipelineError: the nesting is too deep.
    """
    depth = 0
    for bracket in BRACKET.findall(text):
        depth += 1 if bracket in "[{" else -1
        if depth > MOST_LEVELS:
            raise _refused(source, f"its values are nested more than {MOST_LEVELS} deep")


def _count_values(text: str) -> None:
    """Count the values that a text stands for by the parser's events; nothing is built.

    Raises:
        TooMuchYAMLError: there are more than MOST_VALUES or MOST_LEVELS, or one contains itself.
    """
    sizes: dict[str, int] = {}  # of the values under each anchor
    open_values: list[tuple[str | None, int]] = []  # anchor, and the count where it begins
    count = 0
    try:
        for event in yaml.parse(text, Loader=yaml.CSafeLoader):
            if isinstance(event, yaml.AliasEvent):
                if event.anchor in {anchor for anchor, _ in open_values}:
                    raise TooMuchYAMLError(f"the alias *{event.anchor} contains itself")
                count += sizes.get(str(event.anchor), 1)
            elif isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
                open_values.append((event.anchor, count))
                count += 1
                if len(open_values) > MOST_LEVELS:
                    raise TooMuchYAMLError(f"its values are nested more than {MOST_LEVELS} deep")
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
                raise TooMuchYAMLError(f"{cause} more than {MOST_VALUES:,} values")
    except (yaml.YAMLError, ValueError):  # the reader says what is wrong
        return


def _refused(source: str, why: str) -> PipelineError:
    return PipelineError(
        f"{source}: {why}", hint="no configuration is like that; do not use this file"
    )
