"""fp16's loss scale: one rule under every engine, and what crosses a switch."""

from __future__ import annotations

import math
import random
import re

import pytest
import torch
from deepspeed import comm
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
from deepspeed.runtime.precision_config import DeepSpeedFP16Config
from tests.training.optimizer_trials import trial_phase

from zerotrain.config.launch import Fp16Config
from zerotrain.models.families import load_family
from zerotrain.state.position import MASTER
from zerotrain.training.engines.engine import LossScale, is_at_minimum
from zerotrain.training.engines.zero_engine import ZeroEngine

SETTINGS = [
    Fp16Config(),
    Fp16Config(loss_scale_window=3),
    Fp16Config(loss_scale_window=1, initial_scale_power=8),
    Fp16Config(loss_scale_window=4, hysteresis=3, min_loss_scale=64),
    Fp16Config(loss_scale_window=5, hysteresis=2, initial_scale_power=4),
    Fp16Config(loss_scale=128.0, hysteresis=2),
]


class Engine(ZeroEngine):
    """The part of an engine that reads and fills DeepSpeed's scaler."""

    def __init__(self, settings: Fp16Config) -> None:
        config = DeepSpeedFP16Config(enabled=True, **settings.model_dump())
        self._phase = trial_phase(
            "adamw", "zero2", mixed_precision="fp16", fp16=settings.model_dump()
        )
        self._zero = type("Zero", (), {})()
        self._zero.loss_scaler = CreateLossScaler(
            torch.half, config.loss_scale, config.loss_scale == 0, config.dynamic_loss_scale_args()
        )
        self._zero.loss_scaler.raise_error_at_min_scale = False

    def update(self, overflow: bool) -> None:
        self._zero.loss_scaler.update_scale(overflow)


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch):
    monkeypatch.setattr(comm, "get_rank", lambda *args: 0)


def overflows(seed: int, share: float) -> list[bool]:
    """200 steps, of which a share overflow."""
    drawn = random.Random(seed)
    return [drawn.random() < share for _ in range(200)]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("share", [0.05, 0.3])
def test_the_rule_is_deepspeeds(settings, share):
    """A drawn sequence of overflows gives the same scales, and the same state after each."""
    own, deepspeeds = LossScale(settings), Engine(settings)
    scales = []
    for overflow in overflows(1, share):
        own.update(overflow)
        deepspeeds.update(overflow)
        assert own.state() == deepspeeds.loss_scale()
        scales.append(own.scale)
    assert len(set(scales)) > 3 or settings.loss_scale or settings == Fp16Config()


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_switch_at_any_step_changes_no_scale(settings):
    """The state goes from one to the other, at each step of a drawn sequence."""
    sequence = overflows(2, 0.2)
    whole = LossScale(settings)
    own, deepspeeds = LossScale(settings), Engine(settings)
    for step, overflow in enumerate(sequence):
        whole.update(overflow)
        if step % 2:
            deepspeeds.load_loss_scale(own.state())
            deepspeeds.update(overflow)
            own = LossScale(settings)
            own.load(deepspeeds.loss_scale())
        else:
            own.update(overflow)
        assert own.state() == whole.state()


def test_a_shorter_window_and_less_hysteresis_bound_what_is_carried():
    """A change that is due comes at the next good step, under either engine."""
    found = {"scale": 512.0, "good_steps": 900, "hysteresis": 4}
    settings = Fp16Config(loss_scale_window=10, hysteresis=2)
    own, deepspeeds = LossScale(settings), Engine(settings)
    own.load(found)
    deepspeeds.load_loss_scale(found)
    assert own.state() == deepspeeds.loss_scale()
    assert own.state()["hysteresis"] == 2
    own.update(False)
    deepspeeds.update(False)
    assert own.scale == deepspeeds.loss_scale()["scale"] == 1024.0


def test_a_scale_is_exhausted_at_its_lowest_and_where_it_is_fixed():
    """An overflow lowers neither: it has to be reported."""
    lowest = {"scale": 64.0, "good_steps": 0, "hysteresis": 1}
    settings = Fp16Config(min_loss_scale=64)
    assert is_at_minimum(lowest, settings)
    assert not is_at_minimum({**lowest, "scale": 128.0}, settings)
    assert not is_at_minimum({**lowest, "hysteresis": 2}, settings)
    fixed = Fp16Config(loss_scale=128.0)
    assert is_at_minimum(LossScale(fixed).state(), fixed)


@pytest.mark.parametrize("preset", ["torch", pytest.param("zero2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("action", ["stop", "skip"])
def test_a_fixed_scale_that_is_too_high_is_reported(training, preset, action):
    """Every update would be left out, and no loss shows it: the first ends the training, or with
    nan_action skip the eleventh in a row."""
    training.phase(
        *("a", preset, 20), mixed_precision="fp16", fp16={"loss_scale": 2.0**60},
        nan_action=action,
    )  # fmt: skip
    process = training.start("a")
    process.join(60)
    said = training.output.read_text()
    last = {"stop": 1, "skip": 11}[action]
    assert re.search(f"the gradients' norm of step {last} is (inf|nan); its samples: ", said)
    assert "lower learning_rate, or a fixed fp16.loss_scale" in said
    assert said.count("this update is left out (nan_action: skip)") == last - 1


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["torch", "zero2"])
def test_an_overflow_leaves_the_update_out_and_crosses_a_switch(training, preset):
    """A scale far too high: the first updates are left out under either engine, the checkpoint has
    no moments yet, and the next engine continues with the scale, its steps and its hysteresis."""
    settings = Fp16Config(initial_scale_power=28, hysteresis=2)
    shape = {"mixed_precision": "fp16", "fp16": settings.model_dump(), "lr_warmup_steps": 0}
    training.run("first", preset, 2, **shape)
    found = training.checkpoint("first", 2)
    assert found.position.loss_scale == {"scale": 2.0**27, "good_steps": 0, "hysteresis": 1}
    assert found.position.optimizer_step == 0
    assert found.slots == ["master"]
    state = training.export_state("first", 2)
    other = {"torch": "zero2", "zero2": "torch"}[preset]
    training.run("second", other, 30, state=state, **shape)
    last = training.checkpoint("second", 30).position
    rule, norms = LossScale(settings), [line["grad_norm"] for line in training.log("second")]
    left_out = [norm is None or not math.isfinite(norm) for norm in norms]
    for overflow in left_out:
        rule.update(overflow)
    assert last.loss_scale == rule.state()
    assert last.loss_scale["scale"] < 2.0**27
    assert last.optimizer_step == left_out.count(False) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "max_grad_norm"), [("zero1", 0.0), ("zero2_offload", 0.2), ("zero3", 0.0)]
)
def test_an_update_has_the_scale_of_its_pass(training, preset, max_grad_norm):
    """Where the scale is doubled, too: plain SGD under DeepSpeed takes the steps of PyTorch."""
    changes = {
        "mixed_precision": "fp16", "fp16": Fp16Config(loss_scale_window=2).model_dump(),
        "optimizer": "sgd", "adam_weight_decay": 0.0, "adam_beta1": None, "adam_beta2": None,
        "adam_epsilon": None, "learning_rate": 1.0, "lr_scheduler": "constant",
        "lr_warmup_steps": 0, "max_grad_norm": max_grad_norm,
    }  # fmt: skip
    training.run("plain", "torch", 8, **changes)
    training.run("zero", preset, 8, **changes)
    plain, zero = (training.checkpoint(name, 8) for name in ("plain", "zero"))
    assert zero.position.loss_scale == plain.position.loss_scale
    assert plain.position.optimizer_step == 8
    model = load_family("sdxl").load_model(training.base)
    start = torch.cat([p.detach().flatten() for _, p in sorted(model.named_parameters())])
    ends = [
        torch.cat([one.tensor(name, MASTER).flatten() for name in sorted(one.names)])
        for one in (plain, zero)
    ]
    assert (ends[1] - ends[0]).norm() < 0.01 * (ends[0] - start).norm()
    norms = [[line["grad_norm"] for line in training.log(name)] for name in ("plain", "zero")]
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)
