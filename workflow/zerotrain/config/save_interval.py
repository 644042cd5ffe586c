"""How often a checkpoint is saved: a number of steps, or a time such as "30 min"."""

from __future__ import annotations

import re

IN_MINUTES = {"s": 1 / 60, "m": 1.0, "h": 60.0}
TIME = re.compile(
    r"(\d+(?:\.\d+)?)\s*(s|secs?|seconds?|m|mins?|minutes?|h|hours?)\.?", re.IGNORECASE
)
STEPS = re.compile(r"(\d+)\s*steps?", re.IGNORECASE)


def read_interval(value: object) -> int | str:
    """Parse a number of steps ("500 steps" too), or a time, kept as "30 min".

    Raises:
        ValueError: it is neither, or nothing.
    """
    text = str(value).strip()
    if match := STEPS.fullmatch(text):
        text = match[1]
    try:
        steps = float(text)
    except ValueError:
        steps = 0.0
    if not isinstance(value, bool) and steps >= 1 and steps.is_integer():
        return int(steps)
    match = TIME.fullmatch(text)
    time = float(match[1]) * IN_MINUTES[match[2][0].lower()] if match else 0.0
    if time <= 0:
        raise ValueError('must be a number of steps from 1 on, or a time such as "30 min" or "2 h"')
    return f"{time:g} min"


def minutes(interval: int | str) -> float | None:
    """Return the minutes between two saves; None if steps are counted."""
    return None if isinstance(interval, int) else float(interval.removesuffix(" min"))
