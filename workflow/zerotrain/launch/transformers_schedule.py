"""transformers' schedules (transformers/optimization.py, 5.x) as functions of the global step.

If transformers begins a warm-up with a rate of 0, the warm-up here begins with its second rate,
like the usual schedules: the step then counts from 1. Beyond the horizon each schedule keeps its
last value.

`args` has all arguments of the schedule under transformers' names. `peak` is the learning rate,
`steps` the warm-up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Arguments = Mapping[str, Any]

TIMESCALE = 10_000
"""Timescale of inverse_sqrt if there is neither a timescale nor a warm-up."""


def inverse_sqrt(peak: float, args: Arguments, step: int, steps: int, horizon: int) -> float:
    """Return the rate of inverse_sqrt: after the warm-up, peak / sqrt(steps in timescales)."""
    if step < steps:
        return peak * (step + 1) / steps
    timescale = args["timescale"] or steps or TIMESCALE
    return peak / math.sqrt((step - steps + timescale) / timescale)


def cosine_with_min_lr(peak: float, args: Arguments, step: int, steps: int, horizon: int) -> float:
    """Return the rate of cosine_with_min_lr: a cosine down to min_lr instead of 0."""
    if step < steps:
        return peak * (step + 1) / steps
    return _above_floor(peak, args, _completed_share(step - steps, horizon - steps))


def cosine_warmup_with_min_lr(
    peak: float, args: Arguments, step: int, steps: int, horizon: int
) -> float:
    """Return the rate of cosine_warmup_with_min_lr: the same with any initial rate of the warm-up,
    and a cosine that is one step ahead."""
    if step < steps:
        low = args["warmup_lr_rate"]
        share = (step + 1) / steps if low is None else low + (1 - low) * step / max(1, steps - 1)
        return float(peak * share)
    return _above_floor(peak, args, _completed_share(step - steps + 1, horizon - steps))


def warmup_stable_decay(peak: float, args: Arguments, step: int, steps: int, horizon: int) -> float:
    """Return the rate of warmup_stable_decay (WSD): up, constant, and down in num_decay_steps."""
    decay, low = args["num_decay_steps"], args["min_lr_ratio"]
    stable = args["num_stable_steps"]
    fall = horizon - decay if stable is None else steps + stable
    if step < steps:
        share = _slope(args["warmup_type"], 1 - (step + 1) / steps)
    elif step < fall:
        share = 1.0
    elif step < fall + decay:
        done = (step - fall) / decay
        if args["decay_type"] == "cosine":
            done *= 2 * args["num_cycles"]
        share = _slope(args["decay_type"], done)
    else:
        share = 0.0
    return float(peak * (low + (1 - low) * share))


def _slope(shape: str, done: float) -> float:
    """Return a slope from 1 at the top to 0 at the bottom; a warm-up follows it backwards."""
    if shape == "linear":
        return 1 - done
    return (1 + math.cos(math.pi * done)) / 2 if shape == "cosine" else 1 - math.sqrt(done)


def _completed_share(step: int, steps: int) -> float:
    """Return the completed share, at most 1."""
    return min(1.0, step / max(1, steps))


def _above_floor(peak: float, args: Arguments, done: float) -> float:
    low = args["min_lr_rate"] if args["min_lr"] is None else args["min_lr"] / peak
    share = (1 + math.cos(math.pi * 2 * args["num_cycles"] * done)) / 2
    return float(peak * (low + (1 - low) * share))
