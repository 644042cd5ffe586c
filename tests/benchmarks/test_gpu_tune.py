"""The arms of benchmarks/gpu.py --tune, and its table."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from zerotrain.config.read import parse_config

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A script of benchmarks/."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module(name)


def test_every_arm_of_the_tuning_is_a_valid_configuration(monkeypatch) -> None:
    """Its values reach the launch, and each group begins with the default."""
    tune, inputs = load("gpu_tune", monkeypatch), load("gpu_inputs", monkeypatch)
    for arms in tune.GROUPS.values():
        assert next(iter(arms)) == tune.DEFAULT
        for arm in filter(lambda one: isinstance(one, inputs.Training), arms.values()):
            config = parse_config(inputs.raw_config(arm, True, 10), "tune")
            written = config.phases[0].launch.deepspeed.get("zero_optimization", {})
            assert written == arm.zero


def test_an_arm_is_compared_with_the_default_of_its_round(monkeypatch) -> None:
    """Rates count the other way round, and failures not at all."""
    tune = load("gpu_tune", monkeypatch)
    device = {"device": {"allocated_mib": 10.0}}
    known = {
        f"tune_encoding_{arm}:{number}": {"ok": True, "images_per_second": rate, **device}
        for arm, rates in {"default": (4.0, 8.0, 8.0), "batch_1": (2.0, 4.0, 8.0)}.items()
        for number, rate in enumerate(rates, 1)
    }
    known["tune_encoding_batch_1:3"]["ok"] = False
    lines = tune.table(known)
    assert [line.split()[1:4] for line in lines] == [
        ["default", "1.000", "[1.000,"],
        ["batch_1", "2.000", "[2.000,"],
    ]
