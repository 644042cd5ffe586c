"""What a user sets of DeepSpeed's and accelerate's own keys, laid over the derived values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerotrain.errors import PipelineError
from zerotrain.importing.keys import Key, unknown_key
from zerotrain.importing.keys_accelerate import ACCELERATE
from zerotrain.importing.keys_deepspeed import DEEPSPEED
from zerotrain.launch.settings import Settings, leaves

TABLES = {"deepspeed": DEEPSPEED, "accelerate": ACCELERATE}
CHOICES = {"communication_data_type": ("fp32", "fp16", "bf16")}
KINDS = {
    "flag": "true or false",
    "whole": "a whole number from 0",
    "number": "a number from 0",
    "text": "text",
}


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
        key = _find(TABLES[program], dotted)
        if key is None:
            raise unknown_key(f"phase {phase}: launch.{program}", dotted, list(TABLES[program]))
        if value == "auto":
            raise PipelineError(
                f"{where}: nothing is left open in a launch file",
                hint="give a value, or remove the key: what is not given is derived",
            )
        if key.fate != "passed on":
            if key.default is not None and key.default == value and key.fate != "honoured":
                continue  # what is off is off
            raise PipelineError(where + _why(key), hint=_instead(key))
        value = _number(value, key.kind)
        if not _fits(value, key, dotted):
            words = ", ".join(CHOICES.get(dotted, (KINDS.get(key.kind, "a mapping"),)))
            raise PipelineError(f"{where} is no value for it", hint=f"it takes {words}")
        found[dotted] = (value, "user", f"launch.{program}")
    return found


def _find(table: Mapping[str, Key], dotted: str) -> Key | None:
    """A key's own row, or that of the block it stands in."""
    if dotted in table and table[dotted].kind != "section":
        return table[dotted]
    *sections, _ = dotted.split(".")
    above = (table.get(".".join(sections[:n])) for n in range(len(sections), 0, -1))
    return next((key for key in above if key is not None and key.kind == "block"), None)


def _why(key: Key) -> str:
    if key.fate == "honoured":
        return " has a key of its own here, so that no value stands in two places"
    if key.fate == "no-op":
        return f" would do nothing: {key.reason}"
    return f" is not possible: {key.reason}"


def _instead(key: Key) -> str:
    return f"set {key.ours}" if key.fate == "honoured" else "remove the key"


def _number(value: Any, kind: str) -> Any:
    """5e8 and "5e8" are whole numbers where JSON readers want them."""
    if isinstance(value, str) and kind in ("whole", "number"):
        try:
            value = float(value)
        except ValueError:
            return value
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _fits(value: Any, key: Key, dotted: str) -> bool:
    if dotted in CHOICES:
        return value in CHOICES[dotted]
    if key.kind in ("whole", "number"):
        numbers = int if key.kind == "whole" else (int, float)
        return isinstance(value, numbers) and not isinstance(value, bool) and value >= 0
    kinds = {"flag": bool, "text": str}
    return isinstance(value, kinds.get(key.kind, object))
