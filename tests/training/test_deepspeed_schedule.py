"""DeepSpeed's schedules give the rates and momenta that DeepSpeed's own classes give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime import lr_schedules
from tests.builders.phases import make_schedule as section_of
from tests.builders.processes import run_ranks
from tests.builders.runs import make_run

from zerotrain.config.read import parse_config
from zerotrain.config.stage_settings import LaunchSettings
from zerotrain.launch.preset import Preset
from zerotrain.launch.resolve import resolve_phase
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.launch.schedules import learning_rate, momentum

STEPS, PEAK = 60, 3e-4
CYCLE = {"cycle_min_lr": 1e-5, "cycle_max_lr": PEAK, "cycle_first_step_size": 10}
CASES: list[tuple[str, dict[str, Any]]] = [
    *(
        (name, {"warmup_num_steps": warmup, "warmup_type": kind, **own})
        for kind in ("log", "linear")
        for warmup in (1, 2, 13)
        for name, own in [
            ("WarmupLR", {"warmup_min_lr": 1e-6, "warmup_max_lr": PEAK}),
            ("WarmupDecayLR", {"warmup_min_lr": 1e-6, "warmup_max_lr": PEAK,
                               "total_num_steps": 47}),
            ("WarmupCosineLR", {"warmup_min_ratio": 0.1, "cos_min_ratio": 0.05,
                                "total_num_steps": 47}),
        ]
    ),
    ("WarmupLR", {"warmup_num_steps": 9}),
    ("WarmupDecayLR", {"warmup_max_lr": PEAK, "warmup_num_steps": 20, "total_num_steps": 20}),
    ("WarmupCosineLR", {"warmup_num_steps": 20, "total_num_steps": 20}),
    ("OneCycle", CYCLE),
    ("OneCycle", {**CYCLE, "cycle_second_step_size": 23}),
    ("OneCycle", {**CYCLE, "cycle_second_step_size": 0}),
    ("OneCycle", {**CYCLE, "cycle_momentum": False}),
    ("OneCycle", {**CYCLE, "cycle_first_stair_count": 4}),
    ("OneCycle", {**CYCLE, "cycle_first_stair_count": 3, "cycle_second_stair_count": 5,
                  "cycle_second_step_size": 13}),
    ("OneCycle", {**CYCLE, "decay_step_size": 7, "decay_lr_rate": 0.3, "decay_mom_rate": 0.01,
                  "cycle_min_mom": 0.7, "cycle_max_mom": 0.85}),
    ("LRRangeTest", {"lr_range_test_min_lr": 1e-5, "lr_range_test_step_size": 7}),
    ("LRRangeTest", {"lr_range_test_min_lr": 1e-5, "lr_range_test_step_size": 7,
                     "lr_range_test_step_rate": 2.5, "lr_range_test_staircase": True}),
]  # fmt: skip


def resolve(name: str, **args: Any) -> ResolvedPhase:
    """A phase with this schedule, as a user writes it."""
    raw = make_run(
        phases=[{"name": "a", "until": STEPS}],
        train={"lr_scheduler": name, "lr_scheduler_args": args},
    )
    if not {"warmup_max_lr", "cycle_max_lr", "lr_range_test_min_lr"} & args.keys():
        raw["train"] |= {"learning_rate": PEAK}
    settings = LaunchSettings.of(parse_config(raw, "c"), "a")
    return resolve_phase(settings, Preset("torch", "torch"), 100)


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=PEAK, betas=(0.5, 0.99))


def test_every_argument_of_deepspeed_is_known_with_its_default() -> None:
    """As the classes of the installed DeepSpeed have them, but for the position, which follows from
    the step; a peak is learning_rate, and the total is the horizon."""
    import inspect

    from zerotrain.config.lr_scheduler import ARGUMENTS

    for name in lr_schedules.VALID_LR_SCHEDULES:
        theirs = dict(inspect.signature(getattr(lr_schedules, name)).parameters)
        del theirs["optimizer"], theirs["last_batch_iteration"]
        ours = ARGUMENTS[name].model_fields
        assert set(ours) == set(theirs)
        for key, parameter in theirs.items():
            if key in ("warmup_max_lr", "cycle_max_lr", "total_num_steps"):
                assert ours[key].default is None
            elif parameter.default is inspect.Parameter.empty:
                assert ours[key].is_required()
            else:
                assert ours[key].default == parameter.default


@pytest.mark.parametrize(("name", "args"), CASES, ids=lambda value: str(value)[:60])
def test_every_step_has_the_rate_and_the_momentum_of_deepspeeds_class(
    name: str, args: dict[str, Any]
) -> None:
    """The first update included, and the steps beyond the end."""
    phase, own = resolve(name, **args), optimizer()
    scheduler = getattr(lr_schedules, name)(own, **args)
    for step in range(STEPS):
        group = own.param_groups[0]
        horizon = phase.derived.lr_scheduler_steps
        assert learning_rate(phase.train, step, horizon) == pytest.approx(group["lr"], rel=1e-12), (
            step
        )
        beta1 = momentum(phase.train, step, horizon)
        assert (beta1 or 0.5) == pytest.approx(group["betas"][0], rel=1e-12), step
        assert (beta1 is None) == (name != "OneCycle" or not args.get("cycle_momentum", True))
        scheduler.step()


def _train(schedules: list[dict[str, Any]], output: Path) -> None:
    """Updates of DeepSpeed engines that have their schedule from their own file."""
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    used: list[list[tuple[float, float]]] = []
    for schedule in schedules:
        model = torch.nn.Linear(2, 1)
        config = {
            "train_batch_size": 2, "gradient_accumulation_steps": 2,
            "zero_optimization": {"stage": 1}, "scheduler": schedule,
        }  # fmt: skip
        own = torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.5, 0.99))
        engine, *_ = deepspeed.initialize(model=model, optimizer=own, config=config)
        step, found = own.step, []

        def noting(*rest: Any, own=own, step=step, found=found) -> Any:
            found.append((own.param_groups[0]["lr"], own.param_groups[0]["betas"][0]))
            return step(*rest)

        own.step = noting
        for _ in range(2 * 8):
            engine.backward(engine(torch.ones(1, 2)).sum())
            engine.step()
        used.append(found)
    output.write_text(json.dumps(used), encoding="utf-8")


def test_every_update_of_a_deepspeed_engine_had_this_rate(server: Any, tmp_path: Path) -> None:
    """What the optimizer held while the engine stepped it, with two micro batches a step."""
    cases = [case for case in CASES if case[0] != "OneCycle" or case[1].get("cycle_momentum", True)]
    cases = list({name: (name, args) for name, args in cases}.values())
    assert len(cases) == 5
    schedules = [{"type": name, "params": args} for name, args in cases]
    run_ranks(server.Process, _train, 1, schedules, tmp_path / "used.json")
    used = json.loads((tmp_path / "used.json").read_text())
    for (name, args), found in zip(cases, used, strict=True):
        phase = resolve(name, **args)
        horizon = phase.derived.lr_scheduler_steps
        ours = [
            (learning_rate(phase.train, step, horizon), momentum(phase.train, step, horizon) or 0.5)
            for step in range(8)
        ]
        assert [rate for rate, _ in found] == pytest.approx([r for r, _ in ours], rel=1e-12), name
        assert [beta for _, beta in found] == pytest.approx([b for _, b in ours], rel=1e-12), name


def test_a_groups_own_rate_scales_the_curve() -> None:
    """A group's own peak is a share of the phase's: the curve itself knows one peak."""
    args = {"warmup_min_lr": 0.0, "warmup_type": "linear"}
    one, three = (
        section_of("WarmupLR", 4, learning_rate=peak, lr_scheduler_args=args)
        for peak in (1e-4, 3e-4)
    )
    for step in range(8):
        expected = 3 * learning_rate(one, step, 100)
        assert learning_rate(three, step, 100) == pytest.approx(expected, rel=1e-12)
