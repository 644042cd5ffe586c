"""Changing a configuration file as a person would: what is not meant to change keeps its bytes.

The parser knows where each value is, and the text is cut there. Written by the parser,
comments would survive, but not the columns of a table nor the user's line ends.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import pairwise
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, SequenceNode

from zerotrain.artifact.documents import DocumentError, parse_yaml
from zerotrain.config.read import ZERO_KEYS
from zerotrain.config.scalar import scalar
from zerotrain.errors import PipelineError

Values = Mapping[str, Any]
TEXT = "the configuration"
"""What messages call a text that is parsed to see what it means."""
ALONE = (
    "offload_path", "offload_optimizer", "offload_param", "device_memory", "host_memory",
    "zero3_init",
)  # fmt: skip
"""Launch values that go with one preset and not to another."""
DASH = re.compile(r"^( *)-(?=\s)", re.MULTILINE)
NOT_INHERITED = ("allow",)
"""Values of a phase that mean the switch into it."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """A phase ends at a step, and a new one directly after it continues to the former end."""

    phase: str
    """The phase to cut."""
    step: int
    """Its new `until`."""
    name: str
    """The new phase's name. It takes over all that is not set here from the phase that is cut."""
    launch: Values
    """Launch values of the new phase that differ."""
    following: Values = field(default_factory=dict)
    """Values to write into the new phase next to its launch: training values, and `allow`."""
    ended: Values = field(default_factory=dict)
    """Training values to write into the phase that is cut: those it was trained with."""
    ended_launch: Values = field(default_factory=dict)
    """And launch values."""


def split_phase(text: str, split: Split) -> str:
    """Split a phase in a configuration file's text.

    The new phase is written in the style of the one that is cut, block or flow; every other
    character stays.

    Raises:
        PipelineError: the phase is written in a way (merged keys, say) that only a person can edit.
    """
    try:
        new = _split_text(text, split)
        same = parse_yaml(new, TEXT) == split_values(parse_yaml(text, TEXT), split)
    except (LookupError, StopIteration, ValueError, YAMLError):
        same = False
    if not same:
        raise PipelineError(
            f"phase {split.phase} is written in a way that no program should cut",
            hint=f"do it by hand: give {split.phase} `until: {split.step}`, and write a phase "
            f"{split.name} after it with the former `until`, {_by_hand(split)} "
            f"and the other values of {split.phase}",
        )
    return new


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
        same = split_values(parse_yaml(undone, TEXT), split) == parse_yaml(now, TEXT)
    except (LookupError, StopIteration, TypeError, ValueError, YAMLError):
        return None
    return undone if same else None


def keys_dropped_by_preset(former: Any, changes: Values) -> tuple[str, ...]:
    """Return the keys of a former launch that another preset or precision drops.

    Args:
        former: The former preset; None where the phase names none.
        changes: Launch values of the new phase.
    """
    left = ("fp16",) if changes.get("mixed_precision", "fp16") != "fp16" else ()
    preset = changes.get("preset", former)
    if preset == former:
        return left
    if preset == "torch":
        return (*left, *ALONE, *ZERO_KEYS)
    offloads = str(preset).endswith("_offload")
    return (*left, *ALONE) if offloads else (*left, *ALONE, "bf16_optimizer_states")


def _by_hand(split: Split) -> str:
    """Write the new phase's own values as a person writes them."""
    preset = split.launch.get("preset")
    launch = f"launch: {preset}" if set(split.launch) == {"preset"} else ""
    if not launch and split.launch:
        launch = (
            "launch: {" + _row({k: f"{k}: {write_value(v)}" for k, v in split.launch.items()}) + "}"
        )
    more = [f"{key}: {write_value(value)}" for key, value in split.following.items()]
    return ", ".join(f"`{pair}`" for pair in [launch, *more] if pair)


def split_values(raw: Any, split: Split) -> Any:
    """Split a phase in a configuration's values: what the edited text has to mean."""
    phases = raw["phases"]
    place = next(i for i, phase in enumerate(phases) if phase["name"] == split.phase)
    phase = phases[place]
    ended = {**phase, **split.ended, "until": split.step}
    if split.ended_launch:
        ended["launch"] = _launch_values(phase.get("launch"), split.ended_launch)
    following = {key: value for key, value in phase.items() if key not in NOT_INHERITED}
    following["name"] = split.name
    following.update(split.following)
    if "launch" in phase or split.launch:
        following["launch"] = _launch_values(phase.get("launch"), split.launch)
    return {**raw, "phases": [*phases[:place], ended, following, *phases[place + 1 :]]}


def _launch_values(launch: Any, changes: Values) -> Any:
    former = dict(launch) if isinstance(launch, dict) else {"preset": launch} if launch else {}
    left = keys_dropped_by_preset(former.get("preset"), changes)
    former = {key: value for key, value in former.items() if key not in left}
    found = {**copy.deepcopy(former), **changes}
    return found if isinstance(launch, dict) or set(found) != {"preset"} else found["preset"]


def _split_text(text: str, split: Split) -> str:
    newline = "\r\n" if "\r\n" in text else "\n"
    phases = _values(YAML().compose(text))["phases"]
    node = next(node for node in phases.value if _values(node)["name"].value == split.phase)
    values, spans = _values(node), find_spans(text, node)
    launch = values.get("launch")

    pairs = {key: text[slice(*span)] for key, span in spans.items() if key not in NOT_INHERITED}
    pairs["name"] = f"name: {write_value(split.name)}"
    if launch is not None or split.launch:
        pairs["launch"] = f"launch:{_launch(text, launch, split.launch, newline)}"
    pairs |= {key: f"{key}: {write_value(value)}" for key, value in split.following.items()}
    following = _mapping(pairs, node, newline)
    end = find_end(node) if node.flow_style else max(stop for _, stop in spans.values())
    if phases.flow_style:
        inserted = f", {following}"
    else:
        # A comment behind the last value stays on its line.
        end = end + len(text[end:].splitlines()[0]) if text[end:] else end
        dash = dash_column(text, phases)
        inserted = f"{newline}{' ' * dash}{'-':{key_column(node) - dash}}{following}"

    ended = {key: f"{key}: {write_value(value)}" for key, value in split.ended.items()}
    if split.ended_launch:
        ended["launch"] = f"launch:{_launch(text, launch, split.ended_launch, newline)}"
    start, stop = spans["until"]
    new = {key: pair for key, pair in ended.items() if key not in spans}
    until = text[start : values["until"].start_mark.index] + str(split.step)
    edits = [(start, stop, _mapping({**new, "until": until}, node, newline, braces=False))]
    edits += [(*spans[key], pair) for key, pair in ended.items() if key in spans]
    edits += [(end, end, inserted)]
    for start, stop, replacement in sorted(edits, reverse=True):
        text = text[:start] + replacement + text[stop:]
    return text


def _launch(text: str, launch: Node | None, changes: Values, newline: str) -> str:
    """Write what follows `launch:`: a name, or a mapping if there are values next to the preset."""
    pairs = {}
    if isinstance(launch, MappingNode):
        pairs = {key: text[slice(*span)] for key, span in find_spans(text, launch).items()}
        former = _values(launch)["preset"].value if "preset" in pairs else None
    else:
        former = launch.value if launch is not None else None
        pairs = {"preset": f"preset: {former}"} if former else {}
    left = keys_dropped_by_preset(former, changes)
    pairs = {key: pair for key, pair in pairs.items() if key not in left}
    for key, value in changes.items():
        if key != "preset" or value != former:
            pairs[key] = f"{key}: {write_value(value)}"
    if not isinstance(launch, MappingNode):
        only = changes.get("preset", former)
        return f" {write_value(only)}" if set(pairs) == {"preset"} else " {" + _row(pairs) + "}"
    if launch.flow_style:
        return " {" + _row(pairs) + "}"
    return newline + " " * key_column(launch) + _mapping(pairs, launch, newline)


def _row(pairs: dict[str, str]) -> str:
    return ", ".join(pairs.values())


def _mapping(
    pairs: dict[str, str], style: MappingNode, newline: str, *, braces: bool = True
) -> str:
    """Join pairs that are written already into a mapping in the style and column of another."""
    if style.flow_style:
        return "{" + _row(pairs) + "}" if braces else _row(pairs)
    return (newline + " " * key_column(style)).join(pairs.values())


def key_column(mapping: MappingNode) -> int:
    """Return the column of a block mapping's keys; the node itself starts at its anchor."""
    keys = [] if mapping.flow_style else [key for key, _ in mapping.value]
    column: int = min(node.start_mark.column for node in keys or [mapping])
    return column


def dash_column(text: str, sequence: SequenceNode) -> int:
    """Return the column of a block sequence's dashes; no line before the first has one."""
    begin = sequence.start_mark.index - sequence.start_mark.column
    return len(next(DASH.finditer(text, begin))[1])


def _values(mapping: MappingNode) -> dict[str, Any]:
    return {key.value: value for key, value in mapping.value}


def find_spans(text: str, mapping: MappingNode) -> dict[str, tuple[int, int]]:
    """Return by key where it starts and where its value ends."""
    spans: dict[str, tuple[int, int]] = {}
    for key, value in mapping.value:
        end = find_end(value)
        if (
            value.start_mark.index <= key.end_mark.index
            or value.start_mark.index == value.end_mark.index
        ):
            # An alias, whose node is at its anchor; or nothing, and no place is known.
            written = re.compile(r"[ \t]*:([ \t]*\*[^\s,\]}]+)?").match(text, key.end_mark.index)
            end = written.end() if written else end
        spans[key.value] = (key.start_mark.index, end)
    return spans


def find_end(node: Node) -> int:
    """Return where a node's text ends; the parser lets a block end where the next thing starts."""
    if isinstance(node, MappingNode | SequenceNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return find_end(last[1] if isinstance(node, MappingNode) else last)
    end: int = node.end_mark.index
    return end


def write_value(value: Any) -> str:
    """Write a value as YAML, in quotes if any reader (Snakemake's is YAML 1.1) needs them."""
    if isinstance(value, list):
        return f"[{', '.join(map(write_value, value))}]"
    text = str(value)
    if re.fullmatch(r"[\w./-]+", text):
        with contextlib.suppress(DocumentError):
            if parse_yaml(text, TEXT) == value == parse_yaml(text, TEXT, version="1.1"):
                return text
    return scalar(value)


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
