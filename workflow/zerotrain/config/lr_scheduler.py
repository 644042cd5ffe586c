"""Learning-rate schedules by name, the arguments of each, and what contradicts one.

These are train.lr_scheduler and train.lr_scheduler_args. The curves are in
zerotrain.launch.schedules, the formulas in docs/schedules.md. Arguments have the names and defaults
of the library that the schedule is known from.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, WithJsonSchema, model_validator

from zerotrain.config.section import Section, Whole
from zerotrain.config.suggestions import did_you_mean, nearest

WarmupType = Literal["log", "linear"]
Slope = Literal["linear", "cosine", "1-sqrt"]


class NoArguments(Section):
    """The schedule is given by learning_rate, lr_warmup_steps and lr_scheduler_steps."""


class CosineWithRestarts(Section):
    """Arguments of cosine_with_restarts, with diffusers' names and defaults."""

    num_cycles: Whole = Field(1, ge=1, description="Falls from the peak to 0.")


class Polynomial(Section):
    """Arguments of polynomial, with diffusers' names and defaults."""

    lr_end: float = Field(1e-7, ge=0, description="Where it ends.")
    power: float = Field(1.0, gt=0, description="Shape of the fall; 1 is a straight line.")


class InverseSqrt(Section):
    """Arguments of transformers' inverse_sqrt."""

    timescale: Whole | None = Field(
        None, ge=1, description="Steps until 1 / √2 of the peak; default: the warm-up, or 10,000."
    )


class CosineWithMinLR(Section):
    """Arguments of transformers' cosine_with_min_lr."""

    min_lr: float | None = Field(None, ge=0, description="Where it ends; give this or min_lr_rate.")
    min_lr_rate: float | None = Field(
        None, ge=0, le=1, description="Where it ends, as a share of learning_rate."
    )
    num_cycles: float = Field(0.5, gt=0, description="Waves of the cosine; 0.5 is one fall.")

    @model_validator(mode="after")
    def _one_end(self) -> CosineWithMinLR:
        if (self.min_lr is None) == (self.min_lr_rate is None):
            raise ValueError("give min_lr or min_lr_rate: one of the two")
        return self


class CosineWarmupWithMinLR(CosineWithMinLR):
    """Arguments of transformers' cosine_warmup_with_min_lr."""

    warmup_lr_rate: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Share of learning_rate at which the warm-up begins; default: 1 / its steps.",
    )


class WarmupStableDecay(Section):
    """Arguments of transformers' warmup_stable_decay."""

    num_decay_steps: Whole = Field(ge=1, description="Steps of the decay.")
    num_stable_steps: Whole | None = Field(
        None,
        ge=0,
        description="Steps at the peak; default: from the warm-up to the decay, which ends at the "
        "horizon.",
    )
    warmup_type: Slope = Field("linear", description="Shape of the warm-up.")
    decay_type: Slope = Field("cosine", description="Shape of the decay.")
    min_lr_ratio: float = Field(
        0.0, ge=0, le=1, description="Share of learning_rate at which it begins and ends."
    )
    num_cycles: float = Field(0.5, gt=0, description="Waves of a cosine decay; 0.5 is one fall.")


class Sine(Section):
    """Arguments of SimpleTuner's sine."""

    half_period_steps: Whole = Field(
        ge=1, description="Steps of half a wave: `lr_warmup_steps` in SimpleTuner."
    )
    lr_end: float = Field(4e-7, ge=0, description="Lower end of the wave.")


class WarmupLR(Section):
    """Arguments of DeepSpeed's WarmupLR."""

    warmup_min_lr: float = Field(0.0, ge=0, description="Where it begins.")
    warmup_max_lr: float | None = Field(None, gt=0, description="Another name of learning_rate.")
    warmup_num_steps: Whole = Field(1000, ge=1, description="Another name of lr_warmup_steps.")
    warmup_type: WarmupType = Field(
        "log", description="The way up: by the logarithm of the step, or a straight line."
    )


class WarmupDecayLR(WarmupLR):
    """Arguments of DeepSpeed's WarmupDecayLR."""

    total_num_steps: Whole | None = Field(
        None, ge=1, description="Another name of lr_scheduler_steps."
    )


class WarmupCosineLR(Section):
    """Arguments of DeepSpeed's WarmupCosineLR."""

    total_num_steps: Whole | None = Field(
        None, ge=1, description="Another name of lr_scheduler_steps."
    )
    warmup_min_ratio: float = Field(
        0.0, ge=0, le=1, description="Share of learning_rate at which the warm-up begins."
    )
    warmup_num_steps: Whole = Field(1000, ge=1, description="Another name of lr_warmup_steps.")
    warmup_type: WarmupType = Field(
        "log", description="The way up: by the logarithm of the step, or a straight line."
    )
    cos_min_ratio: float = Field(
        0.0001, ge=0, le=1, description="Share of learning_rate at which it ends."
    )


class OneCycle(Section):
    """Arguments of DeepSpeed's OneCycle."""

    cycle_min_lr: float = Field(ge=0, description="Where the cycle begins and ends.")
    cycle_max_lr: float | None = Field(None, gt=0, description="Another name of learning_rate.")
    decay_lr_rate: float = Field(
        0.0, ge=0, description="After the cycle: cycle_min_lr / (1 + this x intervals)."
    )
    cycle_first_step_size: Whole = Field(2000, ge=1, description="Steps up.")
    cycle_second_step_size: Whole | None = Field(
        None, ge=0, description="Steps down; default: cycle_first_step_size."
    )
    cycle_first_stair_count: Whole = Field(
        0, ge=0, description="Stairs on the way up; 0 is a straight line."
    )
    cycle_second_stair_count: Whole | None = Field(
        None, ge=0, description="Stairs on the way down; default: cycle_first_stair_count."
    )
    decay_step_size: Whole = Field(
        0, ge=0, description="Steps of an interval of the decay after the cycle; 0 is no decay."
    )
    cycle_momentum: bool = Field(
        True, description="Let Adam's first beta fall while the learning rate rises, and back."
    )
    cycle_min_mom: float = Field(0.8, ge=0, lt=1, description="The first beta at the peak.")
    cycle_max_mom: float = Field(
        0.9, ge=0, lt=1, description="The first beta at the ends of the cycle."
    )
    decay_mom_rate: float = Field(
        0.0, ge=0, description="After the cycle: cycle_max_mom x (1 + this x intervals)."
    )

    @model_validator(mode="after")
    def _possible(self) -> OneCycle:
        if self.cycle_min_mom > self.cycle_max_mom:
            raise ValueError(
                f"cycle_min_mom {self.cycle_min_mom:g} is above cycle_max_mom "
                f"{self.cycle_max_mom:g}"
            )
        for key in ("decay_lr_rate", "decay_mom_rate"):
            if getattr(self, key) and not self.decay_step_size:
                raise ValueError(f"{key} has no effect without decay_step_size")
        return self


class LRRangeTest(Section):
    """Arguments of DeepSpeed's LRRangeTest."""

    lr_range_test_min_lr: float = Field(
        1e-3, gt=0, description="Where it begins; another name of learning_rate."
    )
    lr_range_test_step_size: Whole = Field(2000, ge=1, description="Steps of an interval.")
    lr_range_test_step_rate: float = Field(
        1.0, ge=0, description="What an interval adds, as a share of the beginning."
    )
    lr_range_test_staircase: bool = Field(
        False, description="Rise at the end of each interval, not at every step."
    )


ARGUMENTS: dict[str, type[Section]] = {
    "constant": NoArguments,
    "constant_with_warmup": NoArguments,
    "linear": NoArguments,
    "cosine": NoArguments,
    "cosine_with_restarts": CosineWithRestarts,
    "polynomial": Polynomial,
    "inverse_sqrt": InverseSqrt,
    "cosine_with_min_lr": CosineWithMinLR,
    "cosine_warmup_with_min_lr": CosineWarmupWithMinLR,
    "warmup_stable_decay": WarmupStableDecay,
    "sine": Sine,
    "WarmupLR": WarmupLR,
    "WarmupDecayLR": WarmupDecayLR,
    "WarmupCosineLR": WarmupCosineLR,
    "OneCycle": OneCycle,
    "LRRangeTest": LRRangeTest,
}

OWN_KEYS = {
    "warmup_max_lr": "learning_rate",
    "cycle_max_lr": "learning_rate",
    "lr_range_test_min_lr": "learning_rate",
    "warmup_num_steps": "lr_warmup_steps",
    "total_num_steps": "lr_scheduler_steps",
}
"""DeepSpeed's parameters that are keys of `train` under another name: one value, set once."""

LOWER_ENDS = ("lr_end", "min_lr", "warmup_min_lr", "cycle_min_lr")
"""Rates that the peak must not be below."""

MEASURING = ("reduce_lr_on_plateau", "greedy")
"""transformers' schedules that no step number determines."""


def scheduler_name(value: Any) -> Any:
    """Return the name as this module writes it.

    Raises:
        ValueError: no schedule has this name; the nearest ones are named.
    """
    if not isinstance(value, str):
        return value
    if value.lower() in MEASURING:
        raise ValueError(
            "this schedule follows a measured loss, and every schedule here is a function of the "
            "step alone, so that a switch keeps it; choose another one"
        )
    known = {name.lower(): name for name in ARGUMENTS}
    if value.lower() not in known:
        near = nearest(value, ARGUMENTS, most=3)
        names = near or list(ARGUMENTS)
        raise ValueError(f"no such schedule; {'the nearest are' if near else 'there are'} "
                         + ", ".join(names))  # fmt: skip
    return known[value.lower()]


SchedulerName = Annotated[
    str,
    BeforeValidator(scheduler_name),
    WithJsonSchema({"type": "string", "enum": list(ARGUMENTS)}),
]
"""A schedule's name, in any case."""


def read_arguments(name: str, given: Any) -> dict[str, Any]:
    """Return the given arguments of a schedule, checked and with their types.

    Raises:
        ValueError: a key or a value is wrong; the sentence names it.
    """
    if not isinstance(given, dict):
        raise ValueError("must be keys with values")
    known = ARGUMENTS[name]
    for key in given:
        if key not in known.model_fields:
            raise ValueError(f"schedule {name} has no argument {key!r}; {_known(known, str(key))}")
    try:
        return known.model_validate(given).model_dump(exclude_unset=True)
    except ValidationError as error:
        raise ValueError("; ".join(_explain(name, d) for d in error.errors())) from error


def _known(known: type[Section], key: str) -> str:
    return did_you_mean(key, known.model_fields) or (
        f"it has {', '.join(known.model_fields) or 'none'}"
    )


def _explain(name: str, detail: Any) -> str:
    message = detail["msg"].removeprefix("Value error, ")
    if not detail["loc"]:
        return f"schedule {name}: {message}"
    key = detail["loc"][0]
    if detail["type"] == "missing":
        return f"schedule {name} needs {key}"
    return f"{key} {detail['input']!r}: {message[0].lower()}{message[1:]}"


def check_contradictions(name: str, values: dict[str, Any], given: set[str]) -> None:
    """Check a schedule's arguments against the keys of `train`.

    Args:
        name: The schedule.
        values: learning_rate, lr_warmup_steps, lr_warmup_ratio, lr_scheduler_steps, adam_beta1 and
            lr_scheduler_args.
        given: Those of them that the user has written.

    Raises:
        ValueError: a value is given twice and differently, or has no meaning with this schedule.
    """
    arguments = values["lr_scheduler_args"]
    for key in arguments.keys() & OWN_KEYS.keys():
        own = OWN_KEYS[key]
        if own in given and values[own] not in (None, arguments[key]):
            raise ValueError(
                f"lr_scheduler_args.{key} {arguments[key]:g} and {own} {values[own]:g} are one "
                "value: give it once"
            )
    _refuse_warmup(name, values, given)
    peak = next((arguments[k] for k in arguments if OWN_KEYS.get(k) == "learning_rate"),
                values["learning_rate"])  # fmt: skip
    fields = ARGUMENTS[name].model_fields
    for key in (key for key in LOWER_ENDS if key in fields):
        low = arguments.get(key, fields[key].default)
        if low is not None and low > peak:
            raise ValueError(f"lr_scheduler_args.{key} {low:g} is above the peak of {peak:g}")
    if name == "OneCycle" and arguments.get("cycle_momentum", True) and "adam_beta1" in given:
        raise ValueError(
            "schedule OneCycle sets adam_beta1 at every step, so adam_beta1 "
            f"{values['adam_beta1']:g} would never be used: remove it, or set "
            "lr_scheduler_args.cycle_momentum to false"
        )


def _refuse_warmup(name: str, values: dict[str, Any], given: set[str]) -> None:
    arguments, ratio = values["lr_scheduler_args"], values["lr_warmup_ratio"]
    if name in ("OneCycle", "LRRangeTest", "sine"):
        if values["lr_warmup_steps"] or ratio:
            key = "lr_warmup_ratio" if ratio else "lr_warmup_steps"
            own = ", which is lr_scheduler_args.half_period_steps here" if name == "sine" else ""
            raise ValueError(f"schedule {name} has no warm-up: remove {key}{own}")
    elif "warmup_num_steps" in ARGUMENTS[name].model_fields:
        if ratio is not None and "warmup_num_steps" in arguments:
            raise ValueError("give lr_scheduler_args.warmup_num_steps or lr_warmup_ratio, not both")
        if ratio == 0 or ("lr_warmup_steps" in given and values["lr_warmup_steps"] == 0):
            key = "lr_warmup_steps" if ratio is None else "lr_warmup_ratio"
            raise ValueError(f"schedule {name} begins with a warm-up: {key} must be above 0")
