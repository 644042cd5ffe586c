"""Learning rate as a function of the global step: the same curve under every engine.

Steps count from the start of the run, over all phases. docs/schedules.md has the formulas.
transformers and DeepSpeed advance objects that belong to an optimizer, and round otherwise; tests
compare with both. Each function here takes the peak, the schedule's arguments under its library's
names, the number of completed steps, and the steps of the warm-up and until the horizon.

transformers' schedules (transformers/optimization.py, 5.x): a warm-up that begins there with a rate
of 0 begins here with its second rate, like the usual schedules: the step then counts from 1. Beyond
the horizon each schedule keeps its last value.

DeepSpeed's schedules (deepspeed/runtime/lr_schedules.py): DeepSpeed sets a rate when it starts and
advances its schedule after each update, so the first two updates of a warm-up have its first rate:
step s uses the count max(0, s - 1). OneCycle and LRRangeTest add one to that count, so it is the
step itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from zerotrain.config.lr_scheduler import ARGUMENTS, OWN_KEYS
from zerotrain.config.optimizers import first_beta
from zerotrain.config.training import TrainConfig
from zerotrain.errors import PipelineError
from zerotrain.launch.resolved import ResolvedPhase, Source

Arguments = Mapping[str, Any]
TIMESCALE = 10_000
"""Timescale of inverse_sqrt if there is neither a timescale nor a warm-up."""


def learning_rate(train: TrainConfig, step: int, horizon: int) -> float:
    """Return the learning rate of the step after `step` completed ones.

    The schedules of LINEAR_WARMUP warm up linearly from learning_rate / warm-up, then follow their
    shape until `horizon` and keep their last value. The others have their own warm-ups.
    """
    peak, steps = train.learning_rate, warmup_steps(train, horizon)
    if train.lr_scheduler not in LINEAR_WARMUP:
        curve = OWN_WARMUP[train.lr_scheduler]
    elif step < steps:
        return peak * (step + 1) / steps
    else:
        curve = LINEAR_WARMUP[train.lr_scheduler]
    return curve(peak, train.lr_scheduler_args, step, steps, horizon)


def momentum(train: TrainConfig, step: int, horizon: int) -> float | None:
    """Return Adam's first beta after `step` completed steps; None: the phase's own.

    OneCycle's is high if the rate is low. The first update uses cycle_min_mom: DeepSpeed starts
    with it, and inverts the cycle from the second update on.
    """
    args = train.lr_scheduler_args
    if train.lr_scheduler != "OneCycle" or not args["cycle_momentum"]:
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


def follows_horizon(train: TrainConfig) -> bool:
    """Return whether another horizon would change the learning rates."""
    if train.lr_warmup_ratio:
        return True
    if train.lr_scheduler == "warmup_stable_decay":
        return train.lr_scheduler_args["num_stable_steps"] is None
    return train.lr_scheduler not in ENDLESS


def warmup_steps(train: TrainConfig, horizon: int) -> int:
    """Return the warm-up steps under a horizon, which may differ from the launch's."""
    if train.lr_warmup_ratio is None:
        return train.lr_warmup_steps
    return warmup_share(train.lr_warmup_ratio, horizon)


def warmup_share(ratio: float, horizon: int) -> int:
    """Return a share of a schedule in whole steps, rounded up; 0.07 of 100 is 7, not 8."""
    return math.ceil(Fraction(str(ratio)) * horizon)


def _constant(peak: float, args: Arguments, step: int, steps: int, horizon: int) -> float:
    return peak


def _linear(peak: float, args: Arguments, step: int, steps: int, horizon: int) -> float:
    return peak * (1 - _completed_share(step - steps, horizon - steps))


def _polynomial(peak: float, args: Arguments, step: int, steps: int, horizon: int) -> float:
    done, end = _completed_share(step - steps, horizon - steps), args["lr_end"]
    return float((peak - end) * (1 - done) ** args["power"] + end)


def _cosine(peak: float, args: Arguments, step: int, steps: int, horizon: int) -> float:
    """Fall from the peak to 0, with restarts if the schedule has `num_cycles`."""
    done = _completed_share(step - steps, horizon - steps)
    if done < 1:
        done = args.get("num_cycles", 1) * done % 1.0
    return peak * _half_cosine(done)


def _inverse_sqrt(peak: float, args: Arguments, step: int, steps: int, horizon: int) -> float:
    """Divide the peak by sqrt(steps in timescales)."""
    timescale = args["timescale"] or steps or TIMESCALE
    return peak / math.sqrt((step - steps + timescale) / timescale)


def _cosine_with_min_lr(peak: float, args: Arguments, step: int, steps: int, horizon: int) -> float:
    """Fall along a cosine to min_lr instead of 0."""
    done = _completed_share(step - steps, horizon - steps)
    low = args["min_lr_rate"] if args["min_lr"] is None else args["min_lr"] / peak
    share = (1 + math.cos(math.pi * 2 * args["num_cycles"] * done)) / 2
    return float(peak * (low + (1 - low) * share))


def _cosine_warmup_with_min_lr(
    peak: float, args: Arguments, step: int, steps: int, horizon: int
) -> float:
    """Do the same with any initial rate of the warm-up, and a cosine that is one step ahead."""
    if step < steps:
        low = args["warmup_lr_rate"]
        share = (step + 1) / steps if low is None else low + (1 - low) * step / max(1, steps - 1)
        return float(peak * share)
    return _cosine_with_min_lr(peak, args, step + 1, steps, horizon)


def _warmup_stable_decay(
    peak: float, args: Arguments, step: int, steps: int, horizon: int
) -> float:
    """Go up, stay, and go down in num_decay_steps (WSD)."""
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
    return _half_cosine(done) if shape == "cosine" else 1 - math.sqrt(done)


def _half_cosine(done: float) -> float:
    return (1 + math.cos(math.pi * done)) / 2


def _completed_share(step: int, steps: int) -> float:
    """Return the completed share, at most 1."""
    return min(1.0, step / max(1, steps))


def _sine(peak: float, args: Arguments, step: int, steps: int, horizon: int) -> float:
    """Wave between lr_end and the peak, starting midway and rising, as in SimpleTuner.

    SimpleTuner (simpletuner/helpers/training/custom_schedule.py) rounds each rate down to a
    multiple of 1e-9; this function does not.
    """
    low: float = args["lr_end"]
    wave = math.sin(math.pi * step / args["half_period_steps"])
    return low + (peak - low) * (1 + wave) / 2


def _warmup_lr(peak: float, args: Arguments, step: int, steps: int, horizon: int) -> float:
    """Go up to the peak, and stay."""
    low: float = args["warmup_min_lr"]
    return low + (peak - low) * _warmup_share(args, max(0, step - 1), steps)


def _warmup_decay_lr(peak: float, args: Arguments, step: int, steps: int, horizon: int) -> float:
    """Go up to the peak, then along a line to warmup_min_lr."""
    low: float = args["warmup_min_lr"]
    count, steps = max(0, step - 1), _at_least_two(steps)
    if count < steps:
        share = _warmup_share(args, count, steps)
    else:
        share = max(0.0, (horizon - count) / max(1, horizon - steps))
    return low + (peak - low) * share


def _warmup_cosine_lr(peak: float, args: Arguments, step: int, steps: int, horizon: int) -> float:
    """Go up from warmup_min_ratio of the peak, then along half a cosine down to cos_min_ratio.

    The very first rate is 0.
    """
    if step == 0:
        return 0.0
    count, steps = step - 1, _at_least_two(steps)
    if count < steps:
        low, share = args["warmup_min_ratio"], _warmup_share(args, count, steps)
    else:
        done = min(1.0, (count - steps + 1) / max(1, horizon - steps))
        low, share = args["cos_min_ratio"], _half_cosine(done)
    return float(peak * (low + (1 - low) * share))


def _one_cycle(peak: float, args: Arguments, step: int, steps: int, horizon: int) -> float:
    """Go from cycle_min_lr to the peak and back, then decay slowly."""
    low: float = args["cycle_min_lr"]
    after = step - _cycle(args)
    if after <= 0:
        return low + (peak - low) * _height(args, step)
    return low / float(1 + args["decay_lr_rate"] * _intervals(args, after))


def _range_test(peak: float, args: Arguments, step: int, steps: int, horizon: int) -> float:
    """Rise without end."""
    intervals = step / args["lr_range_test_step_size"]
    if args["lr_range_test_staircase"]:
        intervals = math.floor(intervals)
    return float(peak * (1 + args["lr_range_test_step_rate"] * intervals))


def _at_least_two(steps: int) -> int:
    """Return at least 2 steps: the logarithm of a warm-up of one step is 0, and it is a divisor."""
    return max(2, steps)


def _warmup_share(args: Arguments, count: int, steps: int) -> float:
    """Return the completed share of a warm-up of DeepSpeed's, 0 to 1."""
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


Curve = Callable[[float, Arguments, int, int, int], float]
LINEAR_WARMUP: dict[str, Curve] = {
    "constant": _constant,
    "constant_with_warmup": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "cosine_with_restarts": _cosine,
    "polynomial": _polynomial,
    "inverse_sqrt": _inverse_sqrt,
    "cosine_with_min_lr": _cosine_with_min_lr,
}
OWN_WARMUP: dict[str, Curve] = {
    "cosine_warmup_with_min_lr": _cosine_warmup_with_min_lr,
    "warmup_stable_decay": _warmup_stable_decay,
    "sine": _sine,
    "WarmupLR": _warmup_lr,
    "WarmupDecayLR": _warmup_decay_lr,
    "WarmupCosineLR": _warmup_cosine_lr,
    "OneCycle": _one_cycle,
    "LRRangeTest": _range_test,
}
ENDLESS = (
    "constant", "constant_with_warmup", "inverse_sqrt", "sine", "WarmupLR", "OneCycle",
    "LRRangeTest",
)  # fmt: skip
"""Schedules without a horizon."""


FOLLOWING = {
    "cycle_second_step_size": "cycle_first_step_size",
    "cycle_second_stair_count": "cycle_first_stair_count",
}
"""Arguments whose default is the value of another argument."""


def with_own_keys(train: TrainConfig, sources: dict[str, tuple[Source, str]]) -> TrainConfig:
    """Move arguments that duplicate keys of `train` to these keys, and fill in the others.

    Afterwards only learning_rate, lr_warmup_steps and lr_scheduler_steps have these values, and
    lr_scheduler_args has every other argument of the schedule. `sources` is updated, with an entry
    `lr_scheduler_args.KEY` for each.
    """
    given = train.lr_scheduler_args
    arguments: dict[str, Any] = {}
    changes: dict[str, Any] = {"lr_scheduler_args": arguments}
    for key, field in ARGUMENTS[train.lr_scheduler].model_fields.items():
        own = OWN_KEYS.get(key)
        if own and key in given:
            changes[own], sources[own] = given[key], ("user", f"lr_scheduler_args.{key}")
        elif own:
            if sources[own][0] == "default" and field.default is not None:
                changes[own] = field.default
                sources[own] = ("default", f"{train.lr_scheduler}'s {key}, as DeepSpeed has it")
        elif key in given and given[key] is not None:
            arguments[key], sources[f"lr_scheduler_args.{key}"] = given[key], ("user", "")
        elif key in FOLLOWING:
            arguments[key] = arguments[FOLLOWING[key]]
            sources[f"lr_scheduler_args.{key}"] = ("derived", FOLLOWING[key])
        else:
            arguments[key], sources[f"lr_scheduler_args.{key}"] = field.default, ("default", "")
    return train.model_copy(update=changes)


def check_schedule(phase: ResolvedPhase) -> None:
    """Refuse a warm-up beyond the horizon, and a cycled momentum that is impossible.

    Raises:
        PipelineError: the message names the keys.
    """
    warmup, horizon = phase.train.lr_warmup_steps, phase.derived.lr_scheduler_steps
    known = ARGUMENTS[phase.train.lr_scheduler].model_fields
    if warmup > horizon:
        keys = [key for key in ("warmup_num_steps", "total_num_steps") if key in known]
        names = "".join(f" (lr_scheduler_args.{key})" for key in keys[:1])
        ends = "".join(f" (lr_scheduler_args.{key})" for key in keys[1:])
        raise PipelineError(
            f"phase {phase.phase}: {warmup} steps of warm-up, but the schedule has {horizon}",
            hint=f"lower lr_warmup_steps{names} or raise lr_scheduler_steps{ends}",
        )
    decay = phase.train.lr_scheduler_args.get("num_decay_steps", 0)
    if phase.train.lr_scheduler_args.get("num_stable_steps") is None and warmup + decay > horizon:
        raise PipelineError(
            f"phase {phase.phase}: {warmup} steps of warm-up and {decay} of decay "
            f"(lr_scheduler_args.num_decay_steps), but the schedule has {horizon}",
            hint="lower lr_warmup_steps or num_decay_steps, or raise lr_scheduler_steps",
        )
    beta1 = momentum(phase.train, phase.derived.until_step - 1, horizon)
    if beta1 is not None and not first_beta(phase.train.optimizer, phase.train.optimizer_args):
        raise PipelineError(
            f"phase {phase.phase}: {phase.train.lr_scheduler} cycles the momentum, and optimizer "
            f"{phase.train.optimizer} has none",
            hint="set lr_scheduler_args.cycle_momentum to false, or choose an optimizer with one: "
            "adamw, or sgd with optimizer_args: {momentum: 0.9}",
        )
    if beta1 is not None and beta1 >= 1:
        raise PipelineError(
            f"phase {phase.phase}: lr_scheduler_args.decay_mom_rate "
            f"{phase.train.lr_scheduler_args['decay_mom_rate']:g} lets the first beta grow to "
            f"{beta1:g} by step {phase.derived.until_step}, but it must stay below 1",
            hint="lower decay_mom_rate or cycle_max_mom, or raise decay_step_size",
        )
