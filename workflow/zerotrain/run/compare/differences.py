"""The values that differ between the sides of a comparison."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from zerotrain.launch.resolved import FILES, leaves
from zerotrain.run.compare.facts import DATA, EVALUATION, PHASES, RAN_ON, Facts, Values

GROUPS = (PHASES, *FILES, DATA, EVALUATION, RAN_ON)
ABSENT = "absent"
"""The value of a key that a mapping does not have, such as an argument of a scheduler."""
Recorded = Sequence[Sequence[Values] | None]
"""The values of each phase of each side; None: the side has no record of them."""
Columns = Sequence[Sequence[Any] | None]
"""The values of a key by side, as in a Difference."""


@dataclass(frozen=True)
class Difference:
    """A key whose values differ."""

    group: str
    key: str
    values: Columns
    """The values of each side: of its phases in order, without repetitions; one for what a run has
    once. None: the side has no record of it."""


def find_differences(sides: Sequence[Facts]) -> list[Difference]:
    """Return the keys that differ, in the order of the groups and of run.yaml.

    All values are resolved: where a default changed between versions, it differs, too.
    """
    return [
        Difference(group, key, values)
        for group in GROUPS
        for key, values in _compare(group, sides)
        if _differ(values)
    ]


def _compare(group: str, sides: Sequence[Facts]) -> Iterator[tuple[str, Columns]]:
    """Yield the values of each key of a group; of a section, those of each key inside."""
    recorded = [side.groups.get(group) for side in sides]
    chosen = {key for side in sides for key in side.chosen if key.startswith(f"{group}.")}
    for key in _keys(recorded):
        columns = _columns(recorded, key, lacking=group in (PHASES, *FILES))
        if key in chosen:  # otherwise a phase without DeepSpeed lacks only its defaults
            columns = [[ABSENT] if column is None else column for column in columns]
        kinds = {isinstance(value, Mapping) for column in columns for value in column or ()}
        if kinds != {True}:
            yield key, columns
        if True in kinds:
            sections = [_section(phases, key) for phases in recorded]
            for name in _keys(sections):
                yield name, _columns(sections, name, lacking=True)


def _section(phases: Sequence[Values] | None, key: str) -> list[Values] | None:
    """Return the leaves of a section in each phase that has it; None if no phase has."""
    found = [values[key] for values in phases or () if isinstance(values.get(key), Mapping)]
    return [dict(leaves(one, f"{key}.")) for one in found] or None


def _columns(recorded: Recorded, key: str, *, lacking: bool) -> Columns:
    """Return the values of a key of each side, over its phases; equal ones in a row once.

    Args:
        recorded: The values by side and phase.
        key: The key.
        lacking: Whether a missing key is a value, ABSENT; otherwise it is not recorded.
    """
    return [
        None
        if phases is None or not (lacking or any(key in values for values in phases))
        else [value for value, _ in groupby(values.get(key, ABSENT) for values in phases)]
        for phases in recorded
    ]


def _keys(recorded: Recorded) -> list[str]:
    return list(dict.fromkeys(key for one in recorded for values in one or () for key in values))


def _differ(columns: Columns) -> bool:
    known = [column for column in columns if column is not None]
    return any(column != known[0] for column in known)
