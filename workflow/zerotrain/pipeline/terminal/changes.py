"""Changed values of a job's parameters, by key.

Snakemake records the parameters of a finished job as the sorted `repr` of their values, without
names. The names come from the current job.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

SHOWN = 4
"""Changed keys that are shown per job."""
WIDTH = 40
"""Characters that are shown per value."""


class _NotSet:
    def __repr__(self) -> str:
        return "not set"


NOT_SET: Any = _NotSet()


@dataclass(frozen=True)
class Change:
    """One changed value; `phase` is empty if the value is not part of a phase."""

    key: str
    old: Any
    new: Any
    phase: str = ""


def describe_changes(
    recorded: Iterable[str], current: Mapping[str, Any], phase: str | None = None
) -> list[str]:
    """Describe what changed between two sets of parameters, as `key old -> new`.

    Args:
        recorded: The `repr` of each value of the last run.
        current: The current values, by name.
        phase: The job's phase, which is not repeated: its name has it already.
    """
    every = {one["name"] for value in current.values() if _is_phases(value) for one in value}
    lines: dict[str, set[str]] = {}
    for change in find_changes(recorded, current):
        if change.old is NOT_SET and change.new is None:
            continue
        lines.setdefault(format_change(change), set()).add(change.phase)
    named = [
        line if not any(phases) or phases in ({phase}, every) else f"{line} ({name_phases(phases)})"
        for line, phases in lines.items()
    ]
    more = len(named) - SHOWN
    return named if more <= 0 else [*named[:SHOWN], f"{more} more changed"]


def format_change(change: Change) -> str:
    """Format a change as `key old -> new`, without its phase."""
    return f"{change.key} {_format(change.old)} -> {_format(change.new)}"


def find_changes(recorded: Iterable[str], current: Mapping[str, Any]) -> list[Change]:
    """Find the values that differ; within sections and lists of phases, the values inside them."""
    left = Counter(recorded)
    new: dict[str, Any] = {}
    for name, value in current.items():
        if left[repr(value)] > 0:
            left[repr(value)] -= 1
        else:
            new[name] = value
    olds = [_parse(text) for text in left.elements()]
    former = _former_values(new, olds)
    return [
        change
        for name, value in new.items()
        for change in _differences(name, former.get(name, NOT_SET), value)
    ]


def _former_values(new: Mapping[str, Any], olds: list[Any]) -> dict[str, Any]:
    """Assign the old values to names, the most similar pairs first."""
    pairs = [(name, number) for name in new for number in range(len(olds))]
    pairs.sort(key=lambda pair: -_similarity(olds[pair[1]], new[pair[0]]))
    found: dict[str, int] = {}
    for name, number in pairs:
        if name not in found and number not in found.values():
            found[name] = number
    return {name: olds[number] for name, number in found.items()}


def _parse(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _similarity(old: Any, new: Any) -> float:
    """Rate how likely two values belong to one key: the share of equal keys or items."""
    if isinstance(old, dict) and isinstance(new, dict):
        return 1 + len(old.keys() & new.keys()) / max(1, len(old.keys() | new.keys()))
    if isinstance(old, list) and isinstance(new, list):
        return 1 + max((_similarity(one, other) for one in old for other in new), default=0) / 4
    return 1.0 if type(old) is type(new) else 0.0


def _differences(key: str, old: Any, new: Any) -> Iterator[Change]:
    if _is_phases(old) and _is_phases(new):
        olds, news = ({one["name"]: one for one in phases} for phases in (old, new))
        for name in olds | news:
            if name in olds and name in news:
                for one in _differences("", olds[name], news[name]):
                    yield Change(one.key, one.old, one.new, name)
            else:
                yield Change("phase", *(name if name in two else NOT_SET for two in (olds, news)))
    elif isinstance(old, dict) and isinstance(new, dict):
        for name in old | new:
            path = f"{key}.{name}" if key else str(name)
            yield from _differences(path, old.get(name, NOT_SET), new.get(name, NOT_SET))
    elif old != new or type(old) is not type(new):
        yield Change(key, old, new)


def name_phases(names: set[str]) -> str:
    """Return `phase a` or `phases a, b`."""
    return f"phase{'' if len(names) == 1 else 's'} {', '.join(sorted(names))}"


def _is_phases(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(one, dict) and "name" in one for one in value)
    )


def _format(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    text = str(value)
    if isinstance(value, dict):
        text = ", ".join(f"{name}: {one}" for name, one in value.items() if one is not None)
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 3]}..."
