"""Giving a configuration's text new values: comments, order and the bytes of all others stay.

As in `zerotrain.config.edit`, the parser knows where each value is, and the text is cut there. What
cannot be cut is written by the parser, which keeps comments and order, but no columns of a table.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from zerotrain.artifact.documents import parse_yaml
from zerotrain.config.edit import dash_column, find_end, find_spans, key_column, write_value
from zerotrain.errors import PipelineError

Edit = tuple[int, int, str]
"""Start and end in the text, and what to write there."""


def update_text(text: str, values: dict[str, Any], source: str) -> str:
    """Change a configuration's text so that it means the given values.

    Args:
        text: The text of a file with keys.
        values: All values that it is to have; keys that are not here are removed.
        source: What messages call the file.

    Raises:
        PipelineError: the text holds no keys, or is written in a way that only a person can edit.
    """
    try:
        former = parse_yaml(text, source)
        root = YAML().compose(text)
    except (YAMLError, ValueError) as error:
        raise _by_hand(source) from error
    if not isinstance(former, dict) or not isinstance(root, MappingNode):
        raise _by_hand(source)
    for write in (_cut, _round_trip):
        try:
            new = write(text, root, former, values)
            if same_values(parse_yaml(new, source), values):
                return new
        except (LookupError, StopIteration, TypeError, ValueError, YAMLError):
            continue
    raise _by_hand(source)


def same_values(one: Any, other: Any) -> bool:
    """Return whether two values are equal in type, too, as 1 and true are not."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_values(one[k], other[k]) for k in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_values, one, other))
    return type(one) is type(other) and bool(one == other)


def _by_hand(source: str) -> PipelineError:
    return PipelineError(
        f"{source}: is written in a way that no program should change",
        hint="save the values under another name, and copy them over by hand",
    )


def _cut(text: str, root: MappingNode, former: dict[str, Any], values: dict[str, Any]) -> str:
    for start, stop, new in sorted(_of_mapping(text, root, former, values), reverse=True):
        text = text[:start] + new + text[stop:]
    return text


def _of_value(text: str, node: Node, former: Any, new: Any) -> Iterator[Edit]:
    """Yield the edits that give a node another value of its kind."""
    if isinstance(node, MappingNode):
        yield from _of_mapping(text, node, former, new)
    elif isinstance(node, SequenceNode):
        yield from _of_sequence(text, node, former, new)


def _of_mapping(
    text: str, node: MappingNode, former: dict[str, Any], new: dict[str, Any]
) -> Iterator[Edit]:
    spans, nodes = find_spans(text, node), {key.value: (key, value) for key, value in node.value}
    if spans.keys() != former.keys():
        raise LookupError("merged or numbered keys")
    removed, added = former.keys() - new.keys(), [key for key in new if key not in former]
    if node.flow_style and (removed or added):
        pairs = [
            text[slice(*spans[key])]
            if key in former and same_values(former[key], value)
            else f"{write_value(key)}: {_flow(value)}"
            for key, value in new.items()
        ]
        yield node.start_mark.index, find_end(node), "{" + ", ".join(pairs) + "}"
        return
    for key in former:
        if key not in new:
            yield _removal(text, node, key, spans)
        elif not same_values(former[key], new[key]):
            name, value = nodes[key]
            if _is_kept_in_place(value, former[key], new[key]):
                yield from _of_value(text, value, former[key], new[key])
            else:
                yield (*spans[key], _changed_pair(text, name, value, new[key]))
    newline = "\r\n" if "\r\n" in text else "\n"
    indent = newline + " " * key_column(node)
    places: dict[int, list[str]] = {}
    for place, key in enumerate(new):
        if key in former:
            continue
        pair = _block_pair(key, new[key], key_column(node), newline)
        before = [one for one in list(new)[:place] if one in former]
        if before:  # behind the comment of the key before it
            places.setdefault(_line_end(text, spans[before[-1]][1]), []).append(indent + pair)
        else:
            places.setdefault(min(start for start, _ in spans.values()), []).append(pair + indent)
    yield from ((at, at, "".join(pairs)) for at, pairs in places.items())


def _is_kept_in_place(node: Node, former: Any, new: Any) -> bool:
    """Return whether a value is changed inside, and not written again as a whole."""
    if isinstance(node, MappingNode):
        return isinstance(former, dict) and isinstance(new, dict) and bool(former) and bool(new)
    if isinstance(node, SequenceNode) and isinstance(former, list) and isinstance(new, list):
        return bool(former) and bool(new) and not node.flow_style
    return False


def _changed_pair(text: str, key: ScalarNode, value: Node, new: Any) -> str:
    """Write a pair with its key, and what is between the two if the value is on the same line."""
    between = text[key.end_mark.index : value.start_mark.index]
    name = text[key.start_mark.index : key.end_mark.index]
    plain = isinstance(value, ScalarNode) and value.start_mark.index < value.end_mark.index
    if not plain or "\n" in between or not between.strip().startswith(":"):
        between = ": "
    return f"{name}{between if between.strip() == ':' else ': '}{_flow(new)}"


def _removal(text: str, node: MappingNode, key: str, spans: dict[str, tuple[int, int]]) -> Edit:
    """Return the edit that removes a pair of a block with its line, and the comment behind it."""
    start, stop = spans[key]
    begin = text.rfind("\n", 0, start) + 1
    if text[begin:start].strip():  # the first key of a list's item, which follows the dash
        following = [span[0] for span in spans.values() if span[0] > start]
        return start, min(following), ""
    end = _line_end(text, stop)
    return begin, min(end + len(text[end : end + 2].partition("\n")[0]) + 1, len(text)), ""


def _of_sequence(
    text: str, node: SequenceNode, former: list[Any], new: list[Any]
) -> Iterator[Edit]:
    newline = "\r\n" if "\r\n" in text else "\n"
    for item, old, value in zip(node.value, former, new, strict=False):
        if same_values(old, value):
            continue
        if isinstance(item, MappingNode) and isinstance(old, dict) and isinstance(value, dict):
            yield from _of_mapping(text, item, old, value)
        else:
            yield item.start_mark.index, find_end(item), _flow(value)
    for item in node.value[len(new) :]:
        begin = text.rfind("\n", 0, item.start_mark.index) + 1
        yield begin, min(_line_end(text, find_end(item)) + len(newline), len(text)), ""
    if len(new) > len(former):
        at = _line_end(text, find_end(node.value[-1]))
        dash = " " * dash_column(text, node)
        yield at, at, "".join(f"{newline}{dash}- {_flow(one)}" for one in new[len(former) :])


def _line_end(text: str, index: int) -> int:
    """Return where the line of a value ends, behind its comment."""
    end = text.find("\n", index)
    end = len(text) if end < 0 else end
    return end - 1 if text[end - 1 : end] == "\r" else end


def _flow(value: Any) -> str:
    """Write any value on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{write_value(k)}: {_flow(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(_flow, value))}]"
    return (
        "null"
        if value is None
        else str(value).lower()
        if value is True or value is False
        else (write_value(value))
    )


def _block_pair(key: str, value: Any, column: int, newline: str) -> str:
    """Write a pair; a section has a line for each of its keys, and a list one for each section."""
    inner = newline + " " * (column + 2)
    if isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
        return f"{write_value(key)}:" + "".join(f"{inner}- {_flow(one)}" for one in value)
    if not (isinstance(value, dict) and value):
        return f"{write_value(key)}: {_flow(value)}"
    pairs = [_block_pair(name, one, column + 2, newline) for name, one in value.items()]
    return f"{write_value(key)}:{inner}{inner.join(pairs)}"


def _round_trip(
    text: str, root: MappingNode, former: dict[str, Any], values: dict[str, Any]
) -> str:
    """Let the parser write the text."""
    parser = YAML()
    parser.preserve_quotes = True
    parser.width = 10_000
    parser.indent(mapping=2, sequence=4, offset=2)
    document = parser.load(text)
    _assign(document, values)
    written = io.StringIO()
    parser.dump(document, written)
    return written.getvalue()


def _assign(document: Any, values: dict[str, Any]) -> None:
    for key in [key for key in document if key not in values]:
        del document[key]
    for key, value in values.items():
        if key in document and isinstance(document[key], dict) and isinstance(value, dict):
            _assign(document[key], value)
        elif key not in document or not same_values(document[key], value):
            document[key] = value
