"""A value as one line of YAML that every reader takes for the same."""

from __future__ import annotations

import json
import re
from typing import Any

READ_AS_OTHERS = {"no", "yes", "on", "off", "true", "false", "null", "y", "n"}


def scalar(value: Any) -> str:
    """JSON is YAML; a float keeps a point before its exponent, which YAML 1.1 wants."""
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", value):
        return json.dumps(value) if value.casefold() in READ_AS_OTHERS else value
    if isinstance(value, float) and "e" in repr(value):
        mantissa, _, exponent = repr(value).partition("e")
        return f"{mantissa}{'' if '.' in mantissa else '.0'}e{exponent}"
    if isinstance(value, list):
        return f"[{', '.join(scalar(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{scalar(k)}: {scalar(v)}' for k, v in value.items())}}}"
    return json.dumps(value, ensure_ascii=False)
