"""The learning rate is a function of the global step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers
from diffusers import optimization
from tests.builders.phases import make_schedule

from zerotrain.launch.schedules import follows_horizon, learning_rate


def rates(lr_scheduler: str, warmup: int, horizon: int, steps: int, **args: Any) -> list[float]:
    """The rates of the first steps."""
    settings = make_schedule(lr_scheduler, warmup, lr_scheduler_args=args)
    return [learning_rate(settings, step, horizon) for step in range(steps)]


USUAL: dict[str, dict[str, Any]] = {
    "constant": {},
    "constant_with_warmup": {},
    "linear": {},
    "cosine": {},
    "cosine_with_restarts": {"num_cycles": 3},
    "polynomial": {"power": 2.0, "lr_end": 1e-5},
}


@pytest.mark.parametrize("name", ["cosine", "cosine_with_restarts", "polynomial"])
def test_a_schedule_of_warmup_alone_ends(name: str) -> None:
    """A horizon at the end of the warm-up divides nothing by zero."""
    end = USUAL[name].get("lr_end", 0)
    found = rates(name, 3, 3, 5, **USUAL[name])
    assert found == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3, 1e-3, end])


@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize("name", USUAL)
def test_usual_schedules_are_those_of_diffusers_and_transformers(name: str, warmup: int) -> None:
    """From the end of the warm-up to the horizon at every step, where it stays; within the warm-up
    ours is one step ahead, because theirs spends the first step at a rate of 0. Their `constant`
    has no warm-up."""
    horizon = 60
    theirs = "constant_with_warmup" if name == "constant" else name
    ours = rates(name, warmup, horizon, horizon + 10, **USUAL[name])
    assert set(ours[horizon:]) == {ours[horizon]}
    for expected in (_diffusers(theirs, warmup, horizon), _transformers(theirs, warmup, horizon)):
        assert ours[:warmup] == pytest.approx(expected[1 : warmup + 1], rel=1e-12)
        assert ours[warmup : horizon + 1] == pytest.approx(expected[warmup:], rel=1e-9, abs=1e-16)


def _diffusers(name: str, warmup: int, horizon: int) -> list[float]:
    builders = {str(key.value): value for key, value in
                optimization.TYPE_TO_SCHEDULER_FUNCTION.items()}  # fmt: skip
    steps = {"num_warmup_steps": warmup}
    if name != "constant_with_warmup":
        steps["num_training_steps"] = horizon
    return _used(lambda optimizer: builders[name](optimizer, **steps, **USUAL[name]), horizon + 1)


def _transformers(name: str, warmup: int, horizon: int) -> list[float]:
    def build(optimizer: torch.optim.Optimizer) -> Any:
        return transformers.get_scheduler(
            name, optimizer, warmup, horizon, scheduler_specific_kwargs=USUAL[name]
        )

    return _used(build, horizon + 1)


def _used(build: Any, steps: int) -> list[float]:
    """The rate that each update of a training loop has."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    scheduler = build(optimizer)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


WSD = {
    "num_decay_steps": 20, "num_stable_steps": None, "warmup_type": "linear",
    "decay_type": "cosine", "min_lr_ratio": 0.0, "num_cycles": 0.5,
}  # fmt: skip
ENDS: dict[str, Any] = {"min_lr": None, "min_lr_rate": None, "num_cycles": 0.5}


@pytest.mark.filterwarnings("ignore:Both num_training_steps and num_stable_steps")
@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("inverse_sqrt", {"timescale": None}),
        ("inverse_sqrt", {"timescale": 30}),
        ("cosine_with_min_lr", ENDS | {"min_lr": 2e-4}),
        ("cosine_with_min_lr", ENDS | {"min_lr_rate": 0.1, "num_cycles": 1.75}),
        ("warmup_stable_decay", WSD),
        ("warmup_stable_decay", WSD | {"num_stable_steps": 12, "min_lr_ratio": 0.1}),
        ("warmup_stable_decay", WSD | {"warmup_type": "cosine", "decay_type": "linear"}),
        ("warmup_stable_decay", WSD | {"warmup_type": "1-sqrt", "decay_type": "1-sqrt"}),
        ("warmup_stable_decay", WSD | {"num_cycles": 1.5, "min_lr_ratio": 0.2}),
    ],
)
def test_transformers_schedules_are_those_of_transformers(
    name: str, args: dict[str, Any], warmup: int
) -> None:
    """At every step; within the warm-up ours is one step ahead, as the usual schedules are."""
    horizon = 60
    theirs = _used(lambda optimizer: _of_transformers(optimizer, name, warmup, args), horizon + 10)
    steps = horizon if name.startswith("cosine") else horizon + 10
    ours = rates(name, warmup, horizon, horizon + 10, **args)
    assert ours[:warmup] == pytest.approx(theirs[1 : warmup + 1], rel=1e-12)
    assert ours[warmup:steps] == pytest.approx(theirs[warmup:steps], rel=1e-12, abs=1e-18)
    if name.startswith("cosine"):
        assert set(ours[steps:]) == {ours[steps]}, "it stays where it ends"


@pytest.mark.parametrize("warmup_lr_rate", [None, 0.25])
@pytest.mark.parametrize("warmup", [0, 1, 7])
def test_cosine_warmup_with_min_lr_is_transformers_from_the_first_step(
    warmup: int, warmup_lr_rate: float | None
) -> None:
    args = ENDS | {"min_lr_rate": 0.1, "warmup_lr_rate": warmup_lr_rate}
    name = "cosine_warmup_with_min_lr"
    theirs = _used(lambda optimizer: _of_transformers(optimizer, name, warmup, args), 60)
    assert rates(name, warmup, 60, 60, **args) == pytest.approx(theirs, rel=1e-12)


def _of_transformers(
    optimizer: torch.optim.Optimizer, name: str, warmup: int, args: dict[str, Any]
) -> Any:
    given = {key: value for key, value in args.items() if value is not None}
    return transformers.get_scheduler(name, optimizer, warmup, 60, scheduler_specific_kwargs=given)


def test_sine_is_a_wave_that_starts_halfway() -> None:
    """SimpleTuner's formula by hand (custom_schedule.Sine): the middle, 1, the middle, lr_end, and
    round again; its rates are these, rounded down to a multiple of 1e-9."""
    found = rates("sine", 0, 5, 9, half_period_steps=4, lr_end=2e-4)
    half = math.sqrt(0.5)
    shares = [0.5, (1 + half) / 2, 1, (1 + half) / 2, 0.5, (1 - half) / 2, 0, (1 - half) / 2, 0.5]
    assert found == pytest.approx([2e-4 + 8e-4 * share for share in shares], rel=1e-12)


@pytest.mark.parametrize(("stable", "expected"), [(None, True), (5, False)])
def test_the_horizon_ends_a_stable_phase_without_a_length(
    stable: int | None, expected: bool
) -> None:
    settings = make_schedule(
        "warmup_stable_decay", lr_scheduler_args=WSD | {"num_stable_steps": stable}
    )
    assert follows_horizon(settings) is expected


@pytest.mark.parametrize(
    ("name", "ratio", "expected"),
    [
        ("constant", None, False),
        ("constant", 0.1, True),
        ("cosine", None, True),
        ("WarmupLR", None, False),
        ("WarmupLR", 0.1, True),
        ("WarmupDecayLR", None, True),
        ("OneCycle", None, False),
        ("inverse_sqrt", None, False),
        ("cosine_with_min_lr", None, True),
        ("cosine_warmup_with_min_lr", None, True),
        ("sine", None, False),
    ],
)
def test_the_horizon_matters_where_a_curve_ends_or_its_warmup_is_a_share(
    name: str, ratio: float | None, expected: bool
) -> None:
    assert follows_horizon(make_schedule(name, lr_warmup_ratio=ratio)) is expected
