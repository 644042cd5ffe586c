"""What an import has found so far: values under our keys, and a note for every key it read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from zerotrain.errors import PipelineError
from zerotrain.importing.keys import Key, unknown_key

AUTO = "auto"
Outcome = Literal["kept", "changed", "resolved", "default", "no-op", "left out"]
EXPECTED = {
    "whole": "a whole number",
    "number": "a number",
    "flag": "true or false",
    "text": "text",
    "list": "a list",
    "section": "keys with values",
}


@dataclass(frozen=True)
class Note:
    """What became of one key."""

    key: str
    """As the file or the command line has it; of ours where nothing stood there."""
    given: Any
    """None where nothing was given."""
    outcome: Outcome
    ours: str
    """Our key, or nothing where none says it."""
    value: Any
    reason: str


@dataclass
class Draft:
    """Values under our keys, sections joined by dots, and the notes in the order of reading."""

    values: dict[str, Any] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    shown: dict[str, str] = field(default_factory=dict)
    """Names that a user knows for keys which a reader has put together itself."""

    def put(
        self, outcome: Outcome, key: str, given: Any, ours: str, value: Any, reason: str
    ) -> None:
        """Set one of our keys.

        Raises:
            PipelineError: another key has set it to another value.
        """
        name = self.shown.get(key, key)
        if ours in self.values and self.values[ours] != value:
            before = next(n for n in reversed(self.notes) if n.ours == ours)
            raise PipelineError(
                f"{name} makes {ours} {value!r}, but {before.key} makes it {self.values[ours]!r}",
                hint="let both say the same, or take one of them out",
            )
        self.values[ours] = value
        self.notes.append(Note(name, given, outcome, ours, value, reason))

    def keep(self, key: str, given: Any, ours: str, value: Any = None, reason: str = "") -> None:
        """Take a value over; `value` where ours has another form of the same."""
        self.put("kept", key, given, ours, given if value is None else value, reason)

    def resolve(self, key: str, ours: str, value: Any, reason: str) -> None:
        """Give an "auto" its value."""
        self.put("resolved", key, AUTO, ours, value, reason)

    def default(self, ours: str, value: Any, reason: str) -> None:
        """Set what the file leaves open."""
        self.put("default", ours, None, ours, value, reason)

    def say(
        self,
        outcome: Outcome,
        key: str,
        given: Any,
        reason: str,
        ours: str = "",
        value: Any = None,
    ) -> None:
        """Note a key that sets none of ours by itself."""
        self.notes.append(Note(self.shown.get(key, key), given, outcome, ours, value, reason))

    def ignore(self, key: str, given: Any, reason: str) -> None:
        """Note a key that changes nothing."""
        self.say("no-op", key, given, reason)

    def leave(self, key: str, given: Any, reason: str) -> None:
        """Note a key that cannot be honoured."""
        self.say("left out", key, given, reason)


def read_keys(
    found: Mapping[Any, Any],
    table: Mapping[str, Key],
    where: str,
    draft: Draft,
    prefix: str = "",
    auto_under: str | None = None,
) -> dict[str, Any]:
    """The values of a file by their paths, each of its kind; what the table settles is noted.

    Args:
        found: The file's keys.
        table: Their rows.
        where: Names the file in messages.
        draft: Gets the notes.
        prefix: The section that is read, with a dot.
        auto_under: Beginning of the paths that may be "auto"; None: none may.

    Raises:
        PipelineError: a key that the table does not have or refuses, or a value of another kind.
    """
    flat: dict[str, Any] = {}
    for name, value in found.items():
        path = f"{prefix}{name}"
        key = table.get(path) or table.get(f"{prefix}*")
        if key is None or (path.endswith("*") and path == key.name):
            raise unknown_key(where, path, [name for name in table if not name.endswith("*")])
        if value is None:
            draft.ignore(path, None, "empty")
            continue
        filled = auto_under is not None and path.startswith(auto_under) and key.kind != "section"
        if value == AUTO and key.fate != "no-op" and not filled:
            raise PipelineError(f'{where}: {path}: "auto" means nothing there', hint="give a value")
        typed = _typed(where, path, key, value)
        if key.kind == "section":
            flat.update(read_keys(typed, table, where, draft, f"{path}.", auto_under))
        elif key.fate in ("honoured", "passed on"):
            flat[path] = typed
        elif key.fate == "no-op":
            draft.ignore(path, value, key.reason)
        elif asks_nothing(key, typed):
            draft.say("kept", path, value, "asks for nothing more")
        elif key.fate == "left out":
            draft.leave(path, value, key.reason)
        else:
            raise PipelineError(
                f"{where}: {path}: {value!r} cannot be honoured: {key.reason}",
                hint="take it out of the file if the training is meant without it",
            )
    return flat


def asks_nothing(key: Key, value: Any) -> bool:
    """Whether the value is what holds without it."""
    if isinstance(value, str):
        asked = value.casefold()
        return asked in ("", "no", "none", "false", AUTO) or asked == str(key.default).casefold()
    if isinstance(value, dict):
        return not value.get("enabled", bool(value))
    return not value or bool(value == key.default)


def _typed(where: str, path: str, key: Key, value: Any) -> Any:
    """The value as its kind has it: numbers also from text, as command lines and YAML 1.1 leave."""
    if not _finite(value):
        raise PipelineError(
            f"{where}: {path}: holds a number without end (found {value!r})", hint=f"change {path}"
        )
    if key.kind == "block" or (value == AUTO and key.kind not in ("section", "list")):
        return value
    if key.kind == "section" and isinstance(value, Mapping):
        return value
    if key.kind == "list" and (isinstance(value, list | tuple) or value == AUTO):
        return value if value == AUTO else list(value)
    if key.kind == "text" and isinstance(value, str | int | float):
        return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
    if key.kind == "flag" and (flag := FLAGS.get(str(value).casefold())) is not None:
        return flag
    if key.kind in ("whole", "number") and (number := _number(value)) is not None:
        if key.kind == "number":
            return number
        if number == int(number):
            return int(number)
    raise PipelineError(
        f"{where}: {path}: must be {EXPECTED[key.kind]} (found {value!r})", hint=f"change {path}"
    )


FLAGS = {
    **dict.fromkeys(("true", "yes", "1"), True),
    **dict.fromkeys(("false", "no", "0"), False),
}


def _finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _number(value: Any) -> float | int | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    if not math.isfinite(number):
        return None
    return value if isinstance(value, int) else number
