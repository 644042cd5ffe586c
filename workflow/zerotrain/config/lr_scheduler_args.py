"""The arguments of each learning-rate schedule: train.lr_scheduler_args.

The curves are in zerotrain.launch.schedule, the formulas in docs/schedules.md. Arguments have the
names and defaults of the library that the schedule is known from.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from zerotrain.config.section import Section, Whole

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
