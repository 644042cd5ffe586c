"""User values of DeepSpeed's and accelerate's own keys, which override the derived values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from zerotrain.errors import PipelineError
from zerotrain.launch.resolved import Settings, leaves

if TYPE_CHECKING:
    from zerotrain.launch.keys import Key

CHOICES = {"communication_data_type": ("fp32", "fp16", "bf16")}
EXPECTED = {
    "boolean": "true or false",
    "integer": "a whole number from 0",
    "number": "a number from 0",
    "string": "text",
    "list": "a list",
}


def overlay(settings: Settings, program: str, given: Mapping[str, Any], phase: str) -> Settings:
    """Return the settings with a user's values applied.

    Args:
        settings: The derived settings.
        program: "deepspeed" or "accelerate": the program that reads the file.
        given: The user's values, nested as in that file.
        phase: The phase, for messages.

    Raises:
        PipelineError: a key is unknown, corresponds to one of ours, has no effect, or is refused;
            or a value is "auto" or of another type.
    """
    result = dict(settings)
    if not given:
        return result
    # It reads its tables, which takes as long as the rest of a plan of the phase.
    from zerotrain.launch import keys

    table = {"deepspeed": keys.DEEPSPEED, "accelerate": keys.ACCELERATE}[program]
    for dotted, value in leaves(given):
        where = f"phase {phase}: launch.{program}.{dotted}: {value!r}"
        key = _find(table, dotted)
        if dotted in table and key is None:
            if value == {}:
                continue  # a block without keys changes nothing
            raise PipelineError(f"{where} is no value for it", hint="it takes a mapping")
        if key is None:
            raise keys.unknown_key(f"phase {phase}: launch.{program}", dotted, list(table))
        if value == "auto":
            raise PipelineError(
                f"{where}: nothing is left open in a launch file",
                hint="give a value, or remove the key: what is not given is derived",
            )
        if key.fate != "passed_through":
            if key.default == value and key.fate != "mapped":
                continue  # the default of such a key changes nothing
            raise PipelineError(where + _why(key), hint=_suggest(key))
        value = _number(value, key)
        if not _fits(value, key, dotted):
            words = ", ".join(CHOICES.get(dotted, (EXPECTED.get(key.type, "a mapping"),)))
            raise PipelineError(f"{where} is no value for it", hint=f"it takes {words}")
        result[dotted] = (value, "user", f"launch.{program}")
    return result


def _find(table: Mapping[str, Key], dotted: str) -> Key | None:
    """Return a key's own row, or that of the block that contains it."""
    if dotted in table and table[dotted].type != "section":
        return table[dotted]
    *sections, _ = dotted.split(".")
    above = (table.get(".".join(sections[:n])) for n in range(len(sections), 0, -1))
    return next((key for key in above if key is not None and key.type == "block"), None)


def _why(key: Key) -> str:
    if key.fate == "mapped":
        return " has its own key here, so that no value is set in two places"
    if key.fate == "ignored_no_effect":
        return f" would do nothing: {key.reason}"
    return f" is not possible: {key.reason}"


def _suggest(key: Key) -> str:
    return f"set {key.ours}" if key.fate == "mapped" else "remove the key"


def _number(value: Any, key: Key) -> Any:
    """Read 5e8 and "5e8" as whole numbers, which JSON readers need."""
    if isinstance(value, str) and key.type in ("integer", "number"):
        try:
            value = float(value)
        except ValueError:
            return value
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _fits(value: Any, key: Key, dotted: str) -> bool:
    if dotted in CHOICES:
        return value in CHOICES[dotted]
    if type(value) is type(key.default) and value == key.default:
        return True  # DeepSpeed's depth of all modules is -1
    if key.type in ("integer", "number"):
        numbers = int if key.type == "integer" else (int, float)
        return isinstance(value, numbers) and not isinstance(value, bool) and value >= 0
    if key.type == "block" and dotted == key.name:
        return isinstance(value, Mapping)
    types = {"boolean": bool, "string": str, "list": list}
    return isinstance(value, types.get(key.type, object))
