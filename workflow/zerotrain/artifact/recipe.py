"""What a published folder was made from, and how that differs from what it would be made from now.

manifest.json has it as `recipe`: the stage, its version, the values that it read, without those at
their defaults, and a digest of each input. Folders with the recipe that is asked for are current;
`zerotrain.graph.currency` compares them before Snakemake plans, and a stage compares its
own before it begins.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from zerotrain.artifact.documents import check_type
from zerotrain.artifact.manifest import Artifact

Kind = Literal["settings", "input", "version", "file"]
SHOWN = 4
"""Differences that a message shows."""
WIDTH = 40
"""Characters that are shown per value."""
PHASES = "phases"
"""The key of the list of phases."""
DIGEST = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class Recipe:
    """What a stage makes its folders from."""

    stage: str
    version: int
    settings: dict[str, Any]
    """JSON values by their keys in the configuration."""
    inputs: dict[str, str]
    """Digest of each input by its name in the rule: the identity of a folder, or of files."""

    def with_inputs(self, inputs: Mapping[str, str]) -> Recipe:
        """Return the recipe with further inputs."""
        return replace(self, inputs={**self.inputs, **inputs})

    def as_json(self) -> dict[str, Any]:
        """Return the recipe as a manifest has it."""
        return asdict(self)


class NotSet:
    """A value that one of two recipes does not have."""

    def __repr__(self) -> str:
        return "not set"


NOT_SET = NotSet()


@dataclass(frozen=True)
class Difference:
    """One difference between a folder and a recipe."""

    kind: Kind
    key: str
    """The key of a setting, the name of an input, the stage, or the path of a file."""
    old: Any = NOT_SET
    new: Any = NOT_SET
    phase: str = ""
    """The phase that a setting belongs to; empty if it belongs to none."""


def recipe_of(artifact: Artifact) -> Recipe | None:
    """Return the recipe of a published folder; None if no stage of a rule made it.

    Raises:
        DocumentError: it has other keys or types.
    """
    if artifact.recipe is None:
        return None
    return check_type(artifact.recipe, Recipe, artifact.folder)


def differences(made: Recipe | None, wanted: Recipe) -> list[Difference]:
    """List how what a folder was made from differs from what it would be made from now.

    Args:
        made: The folder's recipe; None if it has none, which differs in its stage.
        wanted: The recipe now. An input that is not there now is UNKNOWN in it.
    """
    if made is None or made.stage != wanted.stage:
        return [Difference("input", wanted.stage)]
    found = []
    if made.version != wanted.version:
        found.append(Difference("version", wanted.stage, made.version, wanted.version))
    found += setting_differences(made.settings, wanted.settings)
    for name in sorted(made.inputs.keys() | wanted.inputs.keys()):
        old, new = made.inputs.get(name, NOT_SET), wanted.inputs.get(name, NOT_SET)
        if new != UNKNOWN and old != new:
            found.append(Difference("input", name, old, new))
    return found


UNKNOWN = "unknown"
"""The digest of an input that is not there, which differs from no other: a folder that is not made
yet, files on a disk that is not mounted."""


def setting_differences(old: Any, new: Any, missing: Any = NOT_SET) -> list[Difference]:
    """List the values that differ, by dotted key; those of a list of phases by phase, and those of
    other lists whose entries have names by name.

    Args:
        old: The former values.
        new: The present ones.
        missing: The value of a key that one side lacks.
    """
    return [*_compare("", old, new, "", missing)]


def format_differences(found: Sequence[Difference], most: int = SHOWN) -> str:
    """Format at most `most` differences in a row, and a count of the rest."""
    more = [f"{len(found) - most} more"] if len(found) > most else []
    return "; ".join([*map(format_difference, found[:most]), *more])


def format_difference(found: Difference) -> str:
    """Format a changed value as `key old -> new`, without its phase; or a new or removed phase."""
    if found.key == "phase" and NOT_SET in (found.old, found.new):
        is_new = found.old is NOT_SET
        return f"phase {found.new if is_new else found.old} is {'new' if is_new else 'removed'}"
    return f"{found.key} {_format(found.old)} -> {_format(found.new)}"


def _format(value: Any) -> str:
    if value is None or value is NOT_SET:
        return "not set"
    if isinstance(value, str) and DIGEST.fullmatch(value):
        return value[:12]
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    if isinstance(value, dict) and value:
        text = ", ".join(
            f"{name}: {_format(one)}" for name, one in value.items() if one is not None
        )
    else:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 3]}..."


def _compare(key: str, old: Any, new: Any, phase: str, missing: Any) -> Iterator[Difference]:
    if _are_named(old) and _are_named(new):
        olds, news = ({one["name"]: one for one in named} for named in (old, new))
        for name in olds | news:
            pair = olds.get(name, missing), news.get(name, missing)
            if key != PHASES:
                yield from _compare(f"{key}.{name}", *pair, phase, missing)
            elif name in olds and name in news:
                yield from _compare("", *pair, name, missing)
            else:
                old_name = name if name in olds else missing
                new_name = name if name in news else missing
                yield Difference("settings", "phase", old_name, new_name)
        if olds.keys() == news.keys() and [*olds] != [*news]:
            yield Difference("settings", key, [*olds], [*news])
    elif isinstance(old, dict) and isinstance(new, dict):
        for name in old | new:
            path = f"{key}.{name}" if key else str(name)
            pair = old.get(name, missing), new.get(name, missing)
            yield from _compare(path, *pair, phase, missing)
    elif old != new:
        yield Difference("settings", key, old, new, phase)


def _are_named(value: Any) -> bool:
    found = isinstance(value, Sequence) and not isinstance(value, str) and bool(value)
    return found and all(
        isinstance(one, dict) and isinstance(one.get("name"), str) for one in value
    )
