"""DeepSpeed's schedules (deepspeed/runtime/lr_schedules.py) as functions of the global step.

DeepSpeed sets a rate when it starts and advances its schedule after each update, so the first two
updates of a warm-up have its first rate: step s uses the count max(0, s - 1). OneCycle and
LRRangeTest add one to that count, so it is the step itself.

`args` has all arguments of the schedule under DeepSpeed's names, except for the peak, the warm-up
and the horizon, which are keys of the phase.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Arguments = Mapping[str, Any]


def warmup(peak: float, args: Arguments, step: int, steps: int, horizon: int) -> float:
    """Return the rate of WarmupLR: up to the peak, then constant."""
    low: float = args["warmup_min_lr"]
    return low + (peak - low) * _warmup_share(args, max(0, step - 1), steps)


def warmup_decay(peak: float, args: Arguments, step: int, steps: int, horizon: int) -> float:
    """Return the rate of WarmupDecayLR: up to the peak, then linear to warmup_min_lr."""
    low: float = args["warmup_min_lr"]
    count, steps = max(0, step - 1), _at_least_two(steps)
    if count < steps:
        share = _warmup_share(args, count, steps)
    else:
        share = max(0.0, (horizon - count) / max(1, horizon - steps))
    return low + (peak - low) * share


def warmup_cosine(peak: float, args: Arguments, step: int, steps: int, horizon: int) -> float:
    """Return the rate of WarmupCosineLR: up from warmup_min_ratio of the peak, then half a cosine
    down to cos_min_ratio of it. The very first rate is 0."""
    if step == 0:
        return 0.0
    count, steps = step - 1, _at_least_two(steps)
    if count < steps:
        low, share = args["warmup_min_ratio"], _warmup_share(args, count, steps)
    else:
        done = min(1.0, (count - steps + 1) / max(1, horizon - steps))
        low, share = args["cos_min_ratio"], (1 + math.cos(math.pi * done)) / 2
    return float(peak * (low + (1 - low) * share))


def one_cycle(peak: float, args: Arguments, step: int, steps: int, horizon: int) -> float:
    """Return the rate of OneCycle: from cycle_min_lr to the peak and back, then a slow decay."""
    low: float = args["cycle_min_lr"]
    after = step - _cycle(args)
    if after <= 0:
        return low + (peak - low) * _height(args, step)
    return low / float(1 + args["decay_lr_rate"] * _intervals(args, after))


def one_cycle_momentum(args: Arguments, step: int) -> float | None:
    """Return Adam's first beta under OneCycle, high if the rate is low; None if it is not cycled.

    The first update uses cycle_min_mom: DeepSpeed starts with it, and inverts the cycle from the
    second update on.
    """
    if not args["cycle_momentum"]:
        return None
    low, high = args["cycle_min_mom"], args["cycle_max_mom"]
    after = step - _cycle(args)
    if step == 0:
        beta1 = low
    elif after <= 0:
        beta1 = high - (high - low) * _height(args, step)
    else:
        beta1 = high * (1 + args["decay_mom_rate"] * _intervals(args, after))
    return float(beta1)


def range_test(peak: float, args: Arguments, step: int, steps: int, horizon: int) -> float:
    """Return the rate of LRRangeTest, which increases without end."""
    intervals = step / args["lr_range_test_step_size"]
    if args["lr_range_test_staircase"]:
        intervals = math.floor(intervals)
    return float(peak * (1 + args["lr_range_test_step_rate"] * intervals))


def _at_least_two(steps: int) -> int:
    """Return at least 2 steps: the logarithm of a warm-up of one step is 0, and it is a divisor."""
    return max(2, steps)


def _warmup_share(args: Arguments, count: int, steps: int) -> float:
    """Return the completed share of a warm-up, 0 to 1."""
    steps = _at_least_two(steps)
    if count >= steps:
        return 1.0
    if args["warmup_type"] == "linear":
        return count / steps
    return math.log(count + 1) / math.log(steps)


def _cycle(args: Arguments) -> int:
    """Return the steps of the cycle."""
    return int(args["cycle_first_step_size"] + args["cycle_second_step_size"])


def _height(args: Arguments, step: int) -> float:
    """Return the position between the cycle's ends (0) and its peak (1), in stairs if any."""
    left = _cycle(args) - step
    if step <= args["cycle_first_step_size"] and left:
        done, size, stairs = step, args["cycle_first_step_size"], args["cycle_first_stair_count"]
    else:
        done, size, stairs = left, args["cycle_second_step_size"], args["cycle_second_stair_count"]
    if not done:
        return 0.0
    return float(math.floor(done * stairs / size) / stairs if stairs else done / size)


def _intervals(args: Arguments, steps: int) -> float:
    """Return the steps after the cycle in decay intervals; without an interval no decay."""
    return steps / args["decay_step_size"] if args["decay_step_size"] else 0.0
