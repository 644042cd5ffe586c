"""The values of a source by the paths of their keys, checked and put by its table of keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zerotrain.artifact.documents import parse_json
from zerotrain.errors import PipelineError
from zerotrain.importers.imported_config import AUTO, ImportedConfig
from zerotrain.launch.keys import Key, unknown_key

Transform = Callable[[str, Any], Any]
"""Takes the key's name for messages, and its value."""


def in_list(name: str, value: Any) -> list[Any]:
    """Return a list of the value alone."""
    return [value]


def to_upper(name: str, value: Any) -> str:
    """Return a name in upper case."""
    return str(value).upper()


def to_names(name: str, value: Any) -> list[str]:
    """Return the names of a text with commas."""
    return [part.strip() for part in str(value).split(",") if part.strip()]


def to_object(name: str, value: Any) -> dict[str, Any]:
    """Return the keys and values of a JSON text.

    Raises:
        PipelineError: it is no such text.
    """
    try:
        found = parse_json(value, name)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise PipelineError(
            f"{name}: {value!r} is not JSON of keys with values",
            hint=f"""write --{name} '{{"min_lr": 1e-6}}'""",
        )
    return found


def to_positive(name: str, value: Any) -> Any:
    """Return a number above 0.

    Raises:
        PipelineError: it is not.
    """
    if value <= 0:
        raise PipelineError(f"{name} is {value}", hint="give a number above 0")
    return value


def to_alpha(name: str, value: Any) -> str:
    """Return the loss mask that a switch of transparency turns on."""
    return "alpha"


def to_extension(name: str, value: Any) -> str:
    """Return a file name's extension with its point."""
    return str(value) if str(value).startswith(".") else f".{value}"


TRANSFORMS: Mapping[str, Transform] = {
    one.__name__: one
    for one in (in_list, to_upper, to_names, to_object, to_positive, to_alpha, to_extension)
}


EXPECTED = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "string": "text",
    "list": "a list",
    "section": "keys with values",
}


def read_keys(
    found: Mapping[Any, Any],
    table: Mapping[str, Key],
    where: str,
    result: ImportedConfig,
    auto_under: str | None = None,
) -> dict[str, Any]:
    """Read the values of a file by their paths, and note the decisions of the table.

    An unsupported key becomes a problem of the result, and the rest is read.

    Args:
        found: The file's keys.
        table: The rows of its keys.
        where: Name of the file in messages.
        result: Receives the notes.
        auto_under: Prefix of the paths that may be "auto"; None: no path may.
    """
    flat: dict[str, Any] = {}

    def read_section(section: Mapping[Any, Any], prefix: str) -> None:
        for name, value in section.items():
            if not result.is_skipped(f"{prefix}{name}", value):
                result.attempt(read_key, f"{prefix}{name}", value, table.get(f"{prefix}*"))

    def read_key(path: str, value: Any, any_other: Key | None) -> None:
        key = table.get(path, any_other)
        if key is None or (path.endswith("*") and path == key.name):
            names = [name for name in table if not name.endswith("*")]
            raise unknown_key(where, path, names if result.has_few_problems else [])
        if value is None:
            result.ignore(path, None, "empty")
        elif key.fate == "ignored_no_effect":
            result.ignore(path, value, key.reason)
        else:
            may_be_auto = auto_under is not None and path.startswith(auto_under)
            if value == AUTO and (key.type == "section" or not may_be_auto):
                raise PipelineError(
                    f'{where}: {path}: "auto" means nothing there', hint="give a value"
                )
            typed = _typed(where, path, key, value)
            if key.type == "section":
                read_section(typed, f"{path}.")
            elif key.fate in ("mapped", "passed_through"):
                flat[path] = typed
            else:
                _note_unmapped(path, value, typed, key, where, result)

    read_section(found, "")
    return flat


def _note_unmapped(
    path: str, value: Any, typed: Any, key: Key, where: str, result: ImportedConfig
) -> None:
    """Note a key that sets none of ours; refuse it if it would change the training."""
    if asks_nothing(key, typed):
        result.note("kept", path, value, "asks for nothing more")
    elif key.fate == "dropped":
        result.drop(path, value, key.reason)
    else:
        raise PipelineError(
            f"{where}: {path}: {value!r} cannot be honoured: {key.reason}",
            hint=f"`--skip {path}` imports the rest, if the training is meant without it",
        )


def drop_dependents(
    arguments: dict[str, Any], table: Mapping[str, Key], result: ImportedConfig, **state: Any
) -> None:
    """Remove the arguments that mean nothing without another one (column `with`), and note them.

    Args:
        arguments: The values that read_keys returned.
        table: The rows of the keys.
        result: Receives the notes.
        state: Values of keys that are not among the arguments, or count instead of them.
    """
    known = {**arguments, **state}
    for row in [row for row in table.values() if row.with_ and row.name in arguments]:
        key, equals, wanted = row.with_.partition(" = ")
        given = known.get(key)
        if str(given).casefold() != wanted.casefold() if equals else not given:
            result.ignore(row.name, arguments.pop(row.name), row.otherwise)


def put_row(row: Key, value: Any, result: ImportedConfig, at: str = "data.") -> None:
    """Set our key of a row by its transform (column `to`).

    Args:
        row: The row.
        value: The value of the other program's key.
        result: Receives our key and the note.
        at: Prefix of our keys of the dataset, instead of `data.`.
    """
    ours = row.ours
    if ours.startswith("data."):
        ours = at + ours.removeprefix("data.")
    if row.to == "no_effect":
        result.ignore(row.name, value, row.says)
    elif row.to == "nothing":
        result.note("kept", row.name, value, row.says)
    elif row.to == "differs":
        result.note("changed", row.name, value, row.says)
    else:
        found = TRANSFORMS[row.to](row.name, value) if row.to else value
        result.put(
            "changed" if row.changed else "kept", row.name, value, ours, found,
            row.changed or row.says,
        )  # fmt: skip


def put_rows(
    arguments: dict[str, Any],
    table: Mapping[str, Key],
    result: ImportedConfig,
    *names: str,
    at: str = "data.",
    prefix: str = "",
) -> None:
    """Remove these arguments, and set our keys of them, or of the defaults that are to be written.

    Args:
        arguments: The values by their names, without the prefix.
        table: The rows of the keys.
        result: Receives our keys.
        names: The names.
        at: As for put_row.
        prefix: Prefix of the names in the table.
    """
    for name in names:
        row = table[prefix + name]
        if name in arguments:
            put_row(row, arguments.pop(name), result, at)
        elif row.assumed and row.ours not in result.values:
            result.assume(row.ours, row.default, row.assumed)


def assume_defaults(
    arguments: Mapping[str, Any], table: Mapping[str, Key], result: ImportedConfig, *ours: str
) -> None:
    """Set these keys of ours, or those below a prefix, to the program's defaults, if not given.

    Rows with a reason in the column `assumed` have such a default.
    """
    for row in (row for prefix in ours for row in table.values() if row.ours.startswith(prefix)):
        if row.assumed and row.name not in arguments and row.ours not in result.values:
            result.assume(row.ours, row.default, row.assumed)


def put_code(
    rows: Sequence[Mapping[str, Any]], family: str, result: ImportedConfig, *parts: str
) -> None:
    """Set the values in a program's code for a family, and note what it does otherwise.

    Args:
        rows: The rows `code` of a file of values.
        family: The family.
        result: Receives our keys and the notes.
        parts: What a column `of` may say.
    """
    for row in rows:
        ours, value, reason = row.get("ours", ""), row.get("value"), row["reason"]
        if family not in row["families"] or row.get("of", "") not in ("", *parts):
            continue
        if "differs" not in row:
            result.assume(ours, value, reason)
        elif value is None:
            result.note("changed", row["differs"], None, reason)
        else:
            result.put("changed", row["differs"], None, ours, value, reason)


def asks_nothing(key: Key, value: Any) -> bool:
    """Return whether the value is the program's default."""
    if isinstance(value, bool) and isinstance(key.default, bool):
        return value is key.default
    if isinstance(value, str):
        asked = value.casefold()
        return asked in ("", "no", "none", "false", AUTO) or asked == str(key.default).casefold()
    if isinstance(value, dict):
        return not value.get("enabled", bool(value))
    return not value or bool(value == key.default)


def _typed(where: str, path: str, key: Key, value: Any) -> Any:
    """Convert the value to the key's type; command lines and YAML 1.1 leave numbers as text."""
    if key.type == "block" or (value == AUTO and key.type not in ("section", "list")):
        return value
    if key.type == "section" and isinstance(value, Mapping):
        return value
    if key.type == "list" and (isinstance(value, list | tuple) or value == AUTO):
        return value if value == AUTO else list(value)
    if key.type == "string" and isinstance(value, str | int | float):
        return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
    if key.type == "boolean" and (flag := FLAGS.get(str(value).casefold())) is not None:
        return flag
    if key.type in ("integer", "number") and (number := _number(value)) is not None:
        if key.type == "number":
            return number
        if number == int(number):
            return int(number)
    raise PipelineError(
        f"{where}: {path}: must be {EXPECTED[key.type]} (found {value!r})",
        hint=f"give {path} such a value, or take it out of the file",
    )


FLAGS = {
    **dict.fromkeys(("true", "yes", "1"), True),
    **dict.fromkeys(("false", "no", "0"), False),
}


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


def without_auto(value: Any) -> Any:
    """Return a block without "auto" entries, for which DeepSpeed uses its defaults."""
    if isinstance(value, dict):
        return {str(k): without_auto(v) for k, v in value.items() if v != AUTO}
    if isinstance(value, list):
        return [without_auto(v) for v in value if v != AUTO]
    return value
