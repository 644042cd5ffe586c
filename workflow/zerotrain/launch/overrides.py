"""What a user sets of DeepSpeed's and accelerate's own keys, laid over the derived values."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from zerotrain.errors import PipelineError
from zerotrain.launch.keys import ACCELERATE, DEEPSPEED, Key, find_key
from zerotrain.launch.settings import Settings, leaves

TABLES = {"deepspeed": DEEPSPEED, "accelerate": ACCELERATE}
WORDS = {bool: "true or false", int: "a whole number from 0", float: "a number from 0", str: "text"}


def overlay(settings: Settings, program: str, given: Mapping[str, Any], phase: str) -> Settings:
    """The settings with a user's values in their places.

    Args:
        settings: What was derived.
        program: "deepspeed" or "accelerate": whose file it is.
        given: The user's values, nested as in that file.
        phase: The phase, for messages.

    Raises:
        PipelineError: a key is unknown, has one of ours for it, would do nothing, or is refused;
            or a value is "auto" or of another kind.
    """
    found = dict(settings)
    for dotted, value in leaves(given):
        where = f"phase {phase}: launch.{program}.{dotted}: {value!r}"
        key = find_key(TABLES[program], dotted)
        if key is None:
            raise PipelineError(f"{where}: {program} has no such key", hint=_near(program, dotted))
        if value == "auto":
            raise PipelineError(
                f"{where}: nothing is left open in a launch file",
                hint="give a value, or remove the key: what is not given is derived",
            )
        if key.harmless == value:
            continue
        if key.verdict != "free":
            raise PipelineError(where + _why(key, dotted), hint=_instead(key, dotted))
        value = _number(value, key.kind)
        if not _fits(value, key.kind):
            raise PipelineError(f"{where} is no value for it", hint=f"it takes {_words(key.kind)}")
        found[dotted] = (value, "user", f"launch.{program}")
    return found


def _why(key: Key, dotted: str) -> str:
    if key.verdict == "ours":
        return " has a key of its own here, so that no value stands in two places"
    if key.verdict == "idle":
        return f" would do nothing: {key.text}"
    return f" is not possible: {key.text}"


def _instead(key: Key, dotted: str) -> str:
    target = dotted.split(".")[-2] if "." in dotted else ""
    return f"set {key.text.format(target=target)}" if key.verdict == "ours" else "remove the key"


def _near(program: str, dotted: str) -> str:
    table = TABLES[program]
    near = difflib.get_close_matches(dotted, table, n=1)
    last = dotted.rpartition(".")[2]
    same = [name for name in table if name.rpartition(".")[2] == last]
    if near or same:
        return f"did you mean {(same or near)[0]}?"
    sections = sorted({name.partition(".")[0] for name in table})
    return f"keys of {program}: {', '.join(sections)}"


def _words(kind: type | tuple[str, ...]) -> str:
    return ", ".join(kind) if isinstance(kind, tuple) else WORDS[kind]


def _number(value: Any, kind: type | tuple[str, ...]) -> Any:
    """5e8 and "5e8" are whole numbers where JSON readers want them."""
    if isinstance(value, str) and kind in (int, float):
        try:
            value = float(value)
        except ValueError:
            return value
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _fits(value: Any, kind: type | tuple[str, ...]) -> bool:
    if isinstance(kind, tuple):
        return value in kind
    if kind in (int, float):
        numbers = int if kind is int else (int, float)
        return isinstance(value, numbers) and not isinstance(value, bool) and value >= 0
    return isinstance(value, kind)
