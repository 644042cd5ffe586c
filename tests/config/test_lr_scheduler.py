"""Schedules and their arguments are taken by name, or refused in a sentence that names the key."""

from __future__ import annotations

from typing import Any

import pytest
from tests.builders.runs import make_config

from zerotrain.config.lr_scheduler import ARGUMENTS
from zerotrain.config.run import RunConfig
from zerotrain.errors import PipelineError

REQUIRED: dict[str, dict[str, Any]] = {
    "OneCycle": {"cycle_min_lr": 0},
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "cosine_warmup_with_min_lr": {"min_lr": 1e-6},
    "warmup_stable_decay": {"num_decay_steps": 10},
    "sine": {"half_period_steps": 100},
}
"""Schedules with an argument that must be given."""


def parse(**train: Any) -> RunConfig:
    return make_config(run="flowers", phases=[{"name": "a", "until": 300}], train=train)


def refusal(name: str, args: Any = None, **train: Any) -> str:
    if args is not None:
        train["lr_scheduler_args"] = args
    with pytest.raises(PipelineError) as caught:
        parse(lr_scheduler=name, **train)
    text = str(caught.value)
    assert "Value error" not in text
    return text


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_name_is_taken_in_any_case(name: str) -> None:
    args = REQUIRED.get(name, {})
    for written in (name, name.upper(), name.lower()):
        found = parse(lr_scheduler=written, lr_scheduler_args=args).phases[0].train
        assert found.lr_scheduler == name


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    """Or with all of them, where none is near."""
    text = refusal("warmup_decay")
    assert "train.lr_scheduler: no such schedule; the nearest are WarmupDecayLR" in text
    assert "(found 'warmup_decay')" in text
    assert "there are constant, constant_with_warmup, linear" in refusal("xyz")


@pytest.mark.parametrize("name", ["reduce_lr_on_plateau", "greedy"])
def test_a_schedule_that_follows_a_loss_is_refused_with_the_reason(name: str) -> None:
    text = refusal(name)
    assert "this schedule follows a measured loss, and every schedule here is a function" in text


@pytest.mark.parametrize(
    ("name", "args", "sentence"),
    [
        ("WarmupLR", {"warmup_steps": 5},
         "schedule WarmupLR has no argument 'warmup_steps'; did you mean warmup_num_steps?"),
        ("WarmupLR", {"total_num_steps": 5}, "schedule WarmupLR has no argument 'total_num_steps'"),
        ("cosine", {"xyz": 1}, "schedule cosine has no argument 'xyz'; it has none"),
        ("polynomial", {"power": "auto"}, "power 'auto': input should be a valid number"),
        ("polynomial", {"power": 0}, "power 0: input should be greater than 0"),
        ("polynomial", {"lr_end": 1e-3}, "lr_end 0.001 is above the peak of 1e-05"),
        ("cosine_with_restarts", {"num_cycles": 0.5}, "num_cycles 0.5: input should be a valid"),
        ("WarmupLR", {"warmup_num_steps": 0}, "warmup_num_steps 0: input should be greater"),
        ("WarmupLR", {"warmup_type": "exp"}, "warmup_type 'exp': input should be 'log' or"),
        ("WarmupLR", {"warmup_max_lr": [1e-4, 1e-5]}, "warmup_max_lr [0.0001, 1e-05]: input"),
        ("WarmupDecayLR", {"warmup_min_lr": 1e-3, "warmup_max_lr": 1e-4},
         "lr_scheduler_args.warmup_min_lr 0.001 is above the peak of 0.0001"),
        ("OneCycle", {"cycle_max_lr": 1e-3}, "schedule OneCycle needs cycle_min_lr"),
        ("OneCycle", None, "schedule OneCycle needs cycle_min_lr"),
        ("OneCycle", {"cycle_min_lr": 1}, "lr_scheduler_args.cycle_min_lr 1 is above the peak"),
        ("OneCycle", {"cycle_min_lr": 0, "cycle_min_mom": 0.95},
         "cycle_min_mom 0.95 is above cycle_max_mom 0.9"),
        ("OneCycle", {"cycle_min_lr": 0, "decay_lr_rate": 0.1},
         "decay_lr_rate has no effect without decay_step_size"),
        ("LRRangeTest", {"lr_range_test_staircase": "no idea"}, "staircase 'no idea'"),
        ("WarmupLR", 5, "must be keys with values"),
        ("cosine_with_min_lr", {"num_cycles": 1},
         "schedule cosine_with_min_lr: give min_lr or min_lr_rate: one of the two"),
        ("cosine_with_min_lr", {"min_lr": 0, "min_lr_rate": 0.1},
         "schedule cosine_with_min_lr: give min_lr or min_lr_rate: one of the two"),
        ("cosine_with_min_lr", {"min_lr": 1e-3}, "min_lr 0.001 is above the peak of 1e-05"),
        ("warmup_stable_decay", None, "schedule warmup_stable_decay needs num_decay_steps"),
        ("sine", {"lr_end": 1e-7}, "schedule sine needs half_period_steps"),
        ("sine", {"half_period_steps": 5, "lr_end": 1}, "lr_end 1 is above the peak of 1e-05"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_named(name: str, args: Any, sentence: str) -> None:
    text = refusal(name, args)
    assert sentence in text
    assert "train.lr_scheduler_args" in text or "train: " in text


@pytest.mark.parametrize(
    ("name", "args", "own", "sentence"),
    [
        ("WarmupLR", {"warmup_max_lr": 1e-3}, {"learning_rate": 1e-4},
         "lr_scheduler_args.warmup_max_lr 0.001 and learning_rate 0.0001 are one value"),
        ("OneCycle", {"cycle_min_lr": 0, "cycle_max_lr": 1e-3}, {"learning_rate": 1e-4},
         "lr_scheduler_args.cycle_max_lr 0.001 and learning_rate 0.0001 are one value"),
        ("WarmupLR", {"warmup_num_steps": 10}, {"lr_warmup_steps": 11},
         "lr_scheduler_args.warmup_num_steps 10 and lr_warmup_steps 11 are one value"),
        ("WarmupLR", {"warmup_num_steps": 10}, {"lr_warmup_ratio": 0.1},
         "give lr_scheduler_args.warmup_num_steps or lr_warmup_ratio, not both"),
        ("WarmupDecayLR", {"total_num_steps": 10}, {"lr_scheduler_steps": 11},
         "lr_scheduler_args.total_num_steps 10 and lr_scheduler_steps 11 are one value"),
        ("WarmupLR", {}, {"lr_warmup_steps": 0}, "lr_warmup_steps must be above 0"),
        ("WarmupCosineLR", {}, {"lr_warmup_ratio": 0}, "lr_warmup_ratio must be above 0"),
        ("LRRangeTest", {}, {"lr_warmup_steps": 5}, "has no warm-up: remove lr_warmup_s"),
        ("OneCycle", {"cycle_min_lr": 0}, {"lr_warmup_ratio": 0.1},
         "OneCycle has no warm-up: remove lr_warmup_ratio"),
        ("sine", {"half_period_steps": 9}, {"lr_warmup_steps": 9},
         "sine has no warm-up: remove lr_warmup_steps, which is lr_scheduler_args.half_period_steps"
         " here"),
        ("OneCycle", {"cycle_min_lr": 0}, {"adam_beta1": 0.9},
         "OneCycle sets adam_beta1 at every step, so adam_beta1 0.9 would never be used"),
    ],
)  # fmt: skip
def test_a_value_that_contradicts_another_is_refused(
    name: str, args: Any, own: dict[str, Any], sentence: str
) -> None:
    """A value that was asked for is never dropped in silence."""
    assert sentence in refusal(name, args, **own)


def test_a_value_given_twice_and_equally_is_taken() -> None:
    """As files that were put together from two programs' have it."""
    args = {"warmup_max_lr": "1e-4", "warmup_num_steps": "1e2", "total_num_steps": 300}
    own = {"learning_rate": 1e-4, "lr_warmup_steps": 100, "lr_scheduler_steps": 300}
    found = parse(lr_scheduler="WarmupDecayLR", lr_scheduler_args=args, **own).phases[0].train
    assert found.lr_scheduler_args == {
        "warmup_max_lr": 1e-4, "warmup_num_steps": 100, "total_num_steps": 300,
    }  # fmt: skip
    free = {"cycle_min_lr": 0, "cycle_momentum": False}
    assert parse(lr_scheduler="OneCycle", lr_scheduler_args=free, adam_beta1=0.8)
