"""The one editor of configurations: what is not meant to change keeps its bytes.

The parser knows where each value is, and the text is cut there. Written by a parser, comments
would survive, but not the columns of a table, the indentation nor the user's line ends.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from zerotrain.artifact.documents import compose_yaml, parse_yaml, read_text
from zerotrain.artifact.documents.limits import AGAIN
from zerotrain.artifact.whole_file import create, replace_file
from zerotrain.config.scalar import PATH, key_lines, scalar
from zerotrain.errors import PipelineError

Key = Sequence[str | int]
"""Keys and places in lists, from the top: ("phases", 0, "launch")."""
Edit = tuple[int, int, str]
"""Start and end in the text, and what to write there."""
MARK = "\ufeff"
"""What some editors of Windows begin a text with; the parser does not count it."""
MERGE = "<<"
"""The key that takes over another mapping's pairs."""
REMOVED = object()
DASH = re.compile(r"^( *)-(?=\s)", re.MULTILINE)
ANCHOR = re.compile(r"(\s*:)[ \t]*&\S+")
"""An anchor between a key and its value."""


class FileChangedError(PipelineError):
    """Another program has saved a file since it was read."""

    def __init__(self, file: Path) -> None:
        super().__init__(
            f"{file}: was saved by another program meanwhile; nothing was written",
            hint="look at it, and do the same again",
        )


class ConfigText:
    """A configuration's text. Each edit returns another one, with the bytes of all other values.

    Args:
        text: The text.
        source: The file, or what messages call it.
        is_new: Whether it is a text for a new file.

    Raises:
        PipelineError: the text is no YAML, or holds no keys.
    """

    def __init__(self, text: str, source: object, *, is_new: bool = False) -> None:
        self.former = None if is_new else text
        self.text, self.source = text, source
        self.values: dict[str, Any] = parse_yaml(text, source)
        if not isinstance(self.values, dict):
            raise self._by_hand()

    @classmethod
    def read(cls, file: Path, *, follow_links: bool = False, hint: str = AGAIN) -> ConfigText:
        """Read a configuration's file."""
        return cls(read_text(file, follow_links=follow_links, hint=hint), file)

    def set(self, key: Key, value: Any) -> ConfigText:
        """Give a key a value, and create the sections above it that are missing.

        Raises:
            PipelineError: there is no such place, or only a person can edit the text.
        """
        return self.update(with_value(self.values, key, value))

    def update(self, values: dict[str, Any]) -> ConfigText:
        """Give the text other values; keys that are not among them are removed.

        Raises:
            PipelineError: the text is written in a way that only a person can edit.
        """
        former = self.values
        return self._edit(lambda text, root: _of_mapping(text, root, former, values), values)

    def copy_phase(self, place: int) -> ConfigText:
        """Write a phase once more after itself, in its style and without its comments.

        Raises:
            PipelineError: the text is written in a way that only a person can edit.
        """
        phases = self.values["phases"]
        copied = [*phases[: place + 1], *phases[place:]]
        return self._edit(
            lambda text, root: [_copy_of_item(text, _nodes(root)["phases"], place)],
            {**self.values, "phases": copied},
        )

    def diff(self) -> list[str]:
        """Return the lines of a unified diff of all edits, with the file's name."""
        return diff(self.former or "", self.text, str(self.source))

    def save(self, file: Path) -> None:
        """Replace the file's text, if it is still the one before the edits; a new file is created.

        Raises:
            FileChangedError: another program has saved the file.
            DiskError: the file cannot be written; it is as it was.
        """
        if self.former is not None:
            if not replace_file(file, self.former.encode(), self.text.encode()):
                raise FileChangedError(file)
            return
        try:
            file.parent.mkdir(exist_ok=True)
            create(file, self.text)
        except FileExistsError as error:
            raise FileChangedError(file) from error

    def _edit(
        self, edits: Callable[[str, Any], Iterable[Edit]], values: dict[str, Any]
    ) -> ConfigText:
        """Cut the text, if the result means the values and nothing else."""
        new = self.text.removeprefix(MARK)
        try:
            root = compose_yaml(new, self.source)
            # Of several lines for one place the deepest comes first: a space is the least letter.
            for start, stop, written in sorted(edits(new, root), reverse=True):
                new = new[:start] + written + new[stop:]
            found = parse_yaml(new, self.source)
        except (AttributeError, LookupError, StopIteration, TypeError, ValueError) as error:
            raise self._by_hand() from error
        if not same_values(found, values):
            raise self._by_hand()
        edited = copy.copy(self)
        edited.text = f"{MARK if self.text.startswith(MARK) else ''}{new}"
        edited.values = found
        return edited

    def _by_hand(self) -> PipelineError:
        return PipelineError(
            f"{self.source}: is written in a way that no program should change",
            hint="save the values under another name, and copy them over by hand",
        )


def diff(before: str, after: str, name: str = "") -> list[str]:
    """Return the lines of a unified diff, as `diff -u` shows them."""
    lines = before.splitlines(), after.splitlines()
    return list(difflib.unified_diff(*lines, name, name, lineterm=""))


def dump(values: Mapping[str, Any]) -> str:
    """Write a configuration's values as a new text, with a line for each key of a section."""
    lines = (line for key, value in values.items() for line in key_lines(key, value, plain=PATH))
    return "".join(f"{line}\n" for line in lines)


def with_value(values: Any, key: Key, value: Any) -> Any:
    """Return values in which a key has another one; missing sections are created.

    A launch that is a preset's name becomes a section where it gets more keys.

    Raises:
        PipelineError: the key leads through a value that is not a section.
    """
    try:
        return _put(values, tuple(key), value)
    except (LookupError, TypeError) as error:
        raise PipelineError(
            f"{'.'.join(map(str, key))}: the configuration has no such place",
            hint="as train.learning_rate, seed or phases.0.launch",
        ) from error


def without_key(values: Any, key: Key) -> Any:
    """Return values without a key; a section that has no other goes with it."""
    return with_value(values, key, REMOVED)


def same_values(one: Any, other: Any) -> bool:
    """Return whether two values are equal in type, too, as 1 and true are not."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_values(one[k], other[k]) for k in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_values, one, other))
    return type(one) is type(other) and bool(one == other)


def _written(value: Any) -> str:
    """Write a value as a person does: names and paths have no quotes."""
    return scalar(value, PATH)


def _put(values: Any, key: tuple[str | int, ...], value: Any) -> Any:
    part, *below = key
    if isinstance(part, int) != isinstance(values, list) or not isinstance(values, dict | list):
        raise TypeError(f"{part} of no section")
    changed: Any = values.copy()
    if below:
        inside = values[part] if isinstance(part, int) else changed.get(part)
        if part == "launch" and isinstance(inside, str):
            inside = {"preset": inside}
        if value is REMOVED and not isinstance(inside, dict | list):
            return values
        changed[part] = _put({} if inside is None else inside, tuple(below), value)
        if value is REMOVED and changed[part] == {} and isinstance(changed, dict):
            del changed[part]
    elif value is REMOVED:
        changed.pop(part, None)
    else:
        changed[part] = value
    return changed


def _of_mapping(
    text: str, node: MappingNode, former: dict[str, Any], new: dict[str, Any]
) -> Iterator[Edit]:
    """Yield the edits that give a mapping other values; keys that it merges are overridden."""
    spans, nodes = _spans(text, node), _nodes(node)
    own = [key for key in nodes if key != MERGE]
    kept = [key for key in own if key in new]
    if not set(own) <= former.keys() or not kept:
        raise LookupError("numbered keys, or none stays")
    for key in own:
        if key not in new:
            yield _removal(text, node, key, spans, kept)
        elif not same_values(former[key], new[key]):
            yield from _of_value(text, node, key, spans, former[key], new[key])
    column = _key_column(node)
    start = min(spans[key][0] for key in kept)
    between = ", " if node.flow_style else f"{_newline(text)}{' ' * column}"
    places: dict[int, list[str]] = {}
    before = None
    for key, value in new.items():
        if key in own:
            before = key
        elif key not in former or not same_values(former[key], value):
            pair = _pair(key, value, column, _newline(text))
            pair = f"{_written(key)}: {_written(value)}" if node.flow_style else pair
            if before is None:
                places.setdefault(start, []).append(pair + between)
            else:
                end = spans[before][1]
                end = end if node.flow_style else _line_end(text, end)  # behind its comment
                places.setdefault(end, []).append(between + pair)
    yield from ((at, at, "".join(pairs)) for at, pairs in places.items())


def _of_value(
    text: str, mapping: MappingNode, key: str, spans: dict[str, tuple[int, int]], old: Any, new: Any
) -> Iterator[Edit]:
    """Yield the edits of a key's value: inside of it where it stays a section or a list."""
    name, value = next(pair for pair in mapping.value if pair[0].value == key)
    alias = value.start_mark.index < name.start_mark.index
    if not alias and old and new and type(old) is type(new):
        if isinstance(value, MappingNode) and old.keys() & new.keys():
            yield from _of_mapping(text, value, old, new)
            return
        if isinstance(value, SequenceNode):
            yield from _of_sequence(text, value, old, new)
            return
    between = text[name.end_mark.index : value.start_mark.index]
    is_text = isinstance(value, ScalarNode) and value.start_mark.index < value.end_mark.index
    one_line = is_text and between.strip(" ") == ":"
    start, stop = spans[key]
    written = text[start : name.end_mark.index]
    yield start, stop, f"{written}{between if one_line else ': '}{_written(new)}"


def _of_sequence(
    text: str, node: SequenceNode, former: list[Any], new: list[Any]
) -> Iterator[Edit]:
    ends = [_end(text, item) for item in node.value]
    for item, end, old, value in zip(node.value, ends, former, new, strict=False):
        if same_values(old, value):
            continue
        if isinstance(item, MappingNode) and isinstance(value, dict) and old.keys() & value.keys():
            yield from _of_mapping(text, item, old, value)
        else:
            yield item.start_mark.index, end, _written(value)
    for item, end in list(zip(node.value, ends, strict=True))[len(new) :]:
        if node.flow_style:
            yield ends[len(new) - 1], ends[-1], ""
            break
        begin = text.rfind("\n", 0, item.start_mark.index) + 1
        yield begin, _next_line(text, end), ""
    added = "".join(f"{_item_start(text, node)}{_written(one)}" for one in new[len(former) :])
    end = ends[-1] if node.flow_style else _line_end(text, ends[-1])
    yield end, end, added


def _removal(
    text: str, node: MappingNode, key: str, spans: dict[str, tuple[int, int]], kept: list[str]
) -> Edit:
    """Return the edit that removes a pair: of a block with its line, and the comment behind it."""
    start, stop = spans[key]
    begin = text.rfind("\n", 0, start) + 1
    if not node.flow_style and not text[begin:start].strip():
        return begin, _next_line(text, stop), ""
    # Of one line, or the first key of a list's item, which follows the dash.
    following = [other for other, _ in spans.values() if other > start]
    if following and any(spans[one][0] > start for one in kept):
        return start, min(following), ""
    return max(end for _, end in spans.values() if end < start), stop, ""


def _copy_of_item(text: str, node: SequenceNode, place: int) -> Edit:
    """Return the edit that inserts a copy of a list's item, a mapping, behind it."""
    item = node.value[place]
    if item.flow_style:
        column, end = 0, _end(text, item)
    else:
        column, end = _key_column(item), max(stop for _, stop in _spans(text, item).values())
    end = end if node.flow_style else _line_end(text, end)  # its comment stays on its line
    start = _item_start(text, node)
    if not item.flow_style:
        start = f"{start.rstrip():{len(_newline(text)) + column}}"
    return end, end, start + _copy(text, item)


def _copy(text: str, mapping: MappingNode) -> str:
    """Return the text of a mapping without its anchors; of its sections, without their comments."""
    column = _newline(text) + " " * _key_column(mapping)
    spans, pairs = _spans(text, mapping), []
    for key, value in mapping.value:
        start, stop = spans[key.value]
        rest = ANCHOR.sub(r"\1", text[key.end_mark.index : stop], count=1)
        section = isinstance(value, MappingNode) and value.start_mark.index > start
        if section and not value.flow_style:
            rest = f":{_newline(text)}{' ' * _key_column(value)}{_copy(text, value)}"
        pairs.append(text[start : key.end_mark.index] + rest)
    return f"{{{', '.join(pairs)}}}" if mapping.flow_style else column.join(pairs)


def _nodes(mapping: MappingNode) -> dict[str, Any]:
    return {key.value: value for key, value in mapping.value}


def _spans(text: str, mapping: MappingNode) -> dict[str, tuple[int, int]]:
    """Return by key where it starts and where its value ends."""
    spans: dict[str, tuple[int, int]] = {}
    for key, value in mapping.value:
        end = _end(text, value)
        if value.start_mark.index <= key.end_mark.index or value.start_mark.index == end:
            # An alias, whose node is at its anchor; or nothing, and no place is known.
            written = re.compile(r"[ \t]*:([ \t]*\*[^\s,\]}]+)?").match(text, key.end_mark.index)
            end = written.end() if written else end
        spans[key.value] = (key.start_mark.index, end)
    return spans


def _end(text: str, node: Node) -> int:
    """Return where a node's text ends; the parser lets a block end where the next thing starts."""
    if isinstance(node, MappingNode | SequenceNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(text, last[1] if isinstance(node, MappingNode) else last)
    start: int = node.start_mark.index
    return start + len(text[start : node.end_mark.index].rstrip())


def _key_column(mapping: MappingNode) -> int:
    """Return the column of a block mapping's keys; the node itself starts at its anchor."""
    columns: list[int] = [key.start_mark.column for key, _ in mapping.value]
    return min(columns)


def _item_start(text: str, sequence: SequenceNode) -> str:
    """Return what comes before a new item: a comma, or a line with a dash where the others are."""
    if sequence.flow_style:
        return ", "
    # Of an anchor, the sequence starts there; no line before the first item has a dash.
    begin = sequence.start_mark.index - sequence.start_mark.column
    return f"{_newline(text)}{next(DASH.finditer(text, begin))[1]}- "


def _line_end(text: str, index: int) -> int:
    """Return where the line of a value ends, behind its comment."""
    end = text.find("\n", index)
    end = len(text) if end < 0 else end
    return end - 1 if text[end - 1 : end] == "\r" else end


def _next_line(text: str, index: int) -> int:
    end = text.find("\n", index)
    return len(text) if end < 0 else end + 1


def _newline(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"


def _pair(key: str, value: Any, column: int, newline: str) -> str:
    """Write a pair that starts at a column, with lines of its own for a section's keys."""
    return newline.join(key_lines(key, value, indent=" " * column, plain=PATH)).lstrip()
