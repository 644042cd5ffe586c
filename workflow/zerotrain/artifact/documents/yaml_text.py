"""YAML and TOML, whose values are counted before anything is built.

Aliases of aliases and deep nesting are built in a moment, and everything that copies, checks or
prints the values then takes hours, or all memory; libyaml ends the process where values are nested
too deeply.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from zerotrain.artifact.documents.limits import (
    AGAIN,
    DEEP,
    MOST_BYTES,
    MOST_LEVELS,
    MOST_VALUES,
    DocumentError,
    LimitError,
    check_levels,
    check_values,
    read_text,
)

Version = Literal["1.1", "1.2"]
SYNTAX = {
    "found a tab character": "a tab is in the indentation: indent with spaces",
    "found unhashable key": "a list or a mapping is no key: put the text in quotes",
    "while scanning for the next token": "no value begins with this character: put the text in "
    "quotes, and indent with spaces instead of tabs",
    "mapping values are not allowed": "a second `: ` in one line, or more indentation than the "
    "line above allows: put a text that holds `: ` in quotes",
    "could not find expected ':'": "a key without `:` in this line or the one above",
    "found unexpected end of stream": "a quote is opened and not closed",
    "expected ',' or ']'": "a list is opened with [ and not closed, or an entry has no comma",
    "expected ',' or '}'": "a mapping is opened with { and not closed, or an entry has no comma",
    "did not find expected '-'": "a list ends here and a key follows with the same indentation",
    "did not find expected key": "the indentation is not that of the lines above",
    "found undefined alias": "a value that begins with * is YAML's alias: put the text in quotes",
    "found unknown escape character": 'a \\ in "double quotes" begins an escape: use single quotes',
}
"""Our words for what YAML's readers say, by a part of theirs; the first that fits is taken."""
DOUBLED = re.compile(r'found duplicate key "([^"]*)"')


def read_yaml(
    path: Path,
    *,
    most: int = MOST_BYTES,
    follow_links: bool = False,
    hint: str = AGAIN,
    version: Version = "1.2",
) -> Any:
    """Read a YAML file; see read_bytes and parse_yaml."""
    text = read_text(path, most=most, follow_links=follow_links, hint=hint)
    return parse_yaml(text, path, hint=hint, version=version)


def parse_yaml(
    text: str,
    source: object,
    *,
    hint: str = AGAIN,
    most: int = MOST_VALUES,
    version: Version = "1.2",
) -> Any:
    """Parse YAML.

    Args:
        text: The text.
        source: What messages call it.
        hint: Of the error.
        most: How many values it may stand for.
        version: 1.2, or 1.1 as Snakemake, DVC and accelerate read it, where `no` is false; it is
            parsed in a third of the time.

    Raises:
        DocumentError: it is no YAML, is nested too deeply, its aliases repeat too much, a value has
            a tag that does not fit, a whole number has more than MOST_BITS, or a text is not valid
            Unicode.
    """
    with _explained(source, "YAML", hint):
        _count_yaml(text, most)
        found = _load(text, version)
        check_values(found)
    return found


def compose_yaml(text: str, source: object) -> Any:
    """Return the nodes of YAML, which know their lines: PyYAML's, or None of an empty text.

    Raises:
        DocumentError: it is no YAML, is nested too deeply, or its aliases repeat too much.
    """
    import yaml

    with _explained(source, "YAML", AGAIN):
        _count_yaml(text, MOST_VALUES)
        found = yaml.compose(text, yaml.CSafeLoader)
    return found


def parse_toml(text: str, source: object, *, hint: str = AGAIN) -> dict[str, Any]:
    """Parse TOML.

    Raises:
        DocumentError: it is no TOML, is nested too deeply, or has a number that does not fit.
    """
    import tomllib

    with _explained(source, "TOML", hint):
        found = tomllib.loads(text)
        check_levels(found)
        check_values(found)
    return found


@contextlib.contextmanager
def _explained(source: object, form: str, hint: str) -> Iterator[None]:
    """Turn whatever a parser raises into a sentence.

    Raises:
        DocumentError: the block raised anything but MemoryError.
    """
    try:
        yield
    except MemoryError:
        raise
    except LimitError as error:
        raise DocumentError(source, str(error), hint=hint) from error
    except RecursionError as error:
        raise DocumentError(source, DEEP, hint=hint) from error
    except Exception as error:  # an impossible date, an empty number, a key that is a list, ...
        raise DocumentError(source, f"not valid {form}: {_describe(error)}", hint=hint) from error


def _count_yaml(text: str, most: int) -> None:
    """Count the values that a YAML text stands for by the parser's events; nothing is built.

    Raises:
        LimitError: there are more than `most` or MOST_LEVELS, or one contains itself.
    """
    import yaml

    sizes: dict[str, int] = {}  # of the values under each anchor
    open_values: list[tuple[str | None, int]] = []  # anchor, and the count where it begins
    count = 0
    try:
        for event in yaml.parse(text, Loader=yaml.CSafeLoader):
            if isinstance(event, yaml.ScalarEvent):
                count += 1
                if event.anchor is not None:
                    sizes[event.anchor] = 1
            elif isinstance(event, yaml.AliasEvent):
                if any(event.anchor == anchor for anchor, _ in open_values):
                    raise LimitError(f"the alias *{event.anchor} contains itself")
                count += sizes.get(str(event.anchor), 1)
            elif isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
                open_values.append((event.anchor, count))
                count += 1
                if len(open_values) > MOST_LEVELS:
                    raise LimitError(DEEP)
            elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
                anchor, begin = open_values.pop()
                if anchor is not None:
                    sizes[anchor] = count - begin
            if count > most:
                cause = "its aliases repeat" if sizes else "it has"
                raise LimitError(f"{cause} more than {most:,} values")
    except yaml.YAMLError:  # the second parser says what is wrong
        return


def _load(text: str, version: Version) -> Any:
    if version == "1.1":
        import yaml

        return yaml.load(text, yaml.CSafeLoader)
    from ruamel.yaml import YAML

    return YAML(typ="safe").load(text)


def _describe(error: Exception) -> str:
    """Return line, column and cause of a text that cannot be parsed."""
    import yaml
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    if not isinstance(error, MarkedYAMLError | yaml.MarkedYAMLError):
        ours = isinstance(error, ValueError | YAMLError | yaml.YAMLError)
        return (" ".join(str(error).split()) if ours else "") or "a value does not fit its tag"
    message = f"{error.context or ''} {error.problem or ''}"
    mark = error.problem_mark or error.context_mark
    at = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    if doubled := DOUBLED.search(message):
        return f"{at}the key {doubled[1]} stands twice: remove one of them"
    cause = next((ours for theirs, ours in SYNTAX.items() if theirs in message), message.strip())
    return f"{at}{cause}"
