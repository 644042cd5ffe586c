"""An optimizer is resolved with all it takes, or refused before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime.config import DeepSpeedConfig
from tests.builders.runs import make_config

from zerotrain.config.stage_settings import LaunchSettings
from zerotrain.errors import PipelineError
from zerotrain.launch.files import read_run_yaml, write_run_yaml
from zerotrain.launch.preset import Preset, read_preset
from zerotrain.launch.resolve import resolve_phase
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.models.sizes import model_sizes

SIZES = model_sizes({"a.weight": [100, 100]})


def preset(name: str) -> Preset:
    return read_preset(Path(f"config/launch/{name}.yaml"))


def resolve(launch: str | dict[str, Any] = "torch", **train: Any) -> ResolvedPhase:
    """A phase with these training values."""
    named = launch if isinstance(launch, str) else launch["preset"]
    return resolve_phase(
        LaunchSettings.of(
            make_config(phases=[{"name": "a", "until": 100, "launch": launch, **train}]), "a"
        ),
        preset(named),
        100,
        SIZES,
    )


def refusal(launch: str | dict[str, Any] = "torch", **train: Any) -> str:
    with pytest.raises(PipelineError) as caught:
        resolve(launch, **train)
    return str(caught.value)


def test_an_optimizer_comes_with_its_own_values(tmp_path: Path) -> None:
    """Adam's keys are null where they mean nothing, the weight decay is the optimizer's own, and
    run.yaml gives all of it back."""
    phase = resolve(optimizer="SGD", optimizer_args={"momentum": "0.9", "nesterov": True})
    assert (phase.train.optimizer, phase.train.optimizer_args) == (
        "sgd",
        {"momentum": 0.9, "nesterov": True},
    )
    assert (phase.train.adam_beta1, phase.train.adam_beta2, phase.train.adam_epsilon) == (
        None,
        None,
        None,
    )
    assert phase.train.adam_weight_decay == 0.0
    assert phase.sources["adam_weight_decay"] == ("derived", "the default of SGD")
    assert resolve(optimizer="sgd", adam_weight_decay=0.3).train.adam_weight_decay == 0.3
    assert resolve(optimizer="muon").train.adam_weight_decay == 0.1
    write_run_yaml(phase, tmp_path / "run.yaml")
    assert read_run_yaml(tmp_path / "run.yaml") == phase
    assert phase.numbers() != resolve(optimizer="sgd").numbers()


def test_an_implementations_name_is_imported_as_adamw() -> None:
    """In run.yaml, with the reason."""
    phase = resolve("zero2_offload", optimizer="CPUAdam")
    assert phase.train.optimizer == "adamw"
    assert phase.train.adam_weight_decay == 0.01
    source, reason = phase.sources["optimizer"]
    assert source == "derived"
    assert reason.startswith("CPUAdam is AdamW")


def test_a_value_in_optimizer_args_that_has_a_key_is_that_key() -> None:
    """With its source; a group without a decay of its own takes it, too."""
    phase = resolve(
        optimizer="adam",
        optimizer_args={"betas": [0.8, 0.9], "weight_decay": 0.2},
        param_groups=[{"parameters": ["bias"], "learning_rate": 1e-3}],
    )
    assert (phase.train.adam_beta1, phase.train.adam_beta2, phase.train.adam_weight_decay) == (
        0.8,
        0.9,
        0.2,
    )
    assert phase.sources["adam_beta2"] == ("user", "optimizer_args")
    assert phase.train.optimizer_args == {}
    assert phase.train.param_groups[0].adam_weight_decay == 0.2


@pytest.mark.parametrize(
    ("launch", "train", "messages"),
    [
        ("torch", {"optimizer": "OneBitAdam"}, ["OneBitAdam: it sends compressed", "works: adam"]),
        ("zero1", {"optimizer": "muon"}, ["Muon needs each parameter whole", "preset zero1"]),
        ("torch", {"optimizer": "sgd", "optimizer_args": {"momentun": 1}}, ["mean momentum?"]),
        ("torch", {"optimizer": "sgd", "adam_beta1": 0.9}, ["adam_beta1 means nothing to SGD"]),
        ("torch", {"optimizer_args": {"betas": [0.9, 0.9]}, "adam_beta2": 0.9}, ["same value"]),
        ({"preset": "zero3_nvme", "offload_path": "/d"}, {"optimizer": "lion"}, ["to a disk"]),
        ({"preset": "zero2", "fp16": {"hysteresis": 2}}, {}, ["only fp16 scales its losses"]),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(
    launch: Any, train: dict[str, Any], messages: list[str]
) -> None:
    """With the reason, and what to do instead."""
    text = refusal(launch, **train)
    assert all(message in text for message in messages), text


def test_a_cycled_momentum_needs_one() -> None:
    """Refused before a step is made, with both ways out."""
    bounds = {"cycle_min_lr": 0, "cycle_max_lr": 1e-3}
    cycle: dict[str, Any] = {"lr_scheduler": "OneCycle", "lr_scheduler_args": bounds}
    text = refusal(optimizer="sgd", **cycle)
    assert "OneCycle cycles the momentum, and optimizer sgd has none" in text
    assert "cycle_momentum to false" in text
    resolve(optimizer="sgd", optimizer_args={"momentum": 0.9}, **cycle)
    resolve(optimizer="lion", **cycle)


def test_deepspeed_accepts_any_optimizer() -> None:
    """Where it is not its own; its parser takes the file."""
    for optimizer, arguments, told in (
        ("lion", {}, True), ("adamw", {}, False), ("adamw", {"amsgrad": True}, True),
    ):  # fmt: skip
        phase = resolve("zero2_offload", optimizer=optimizer, optimizer_args=arguments)
        written = phase.derived.deepspeed
        assert written.get("zero_allow_untested_optimizer", False) is told
        assert written.get("zero_force_ds_cpu_optimizer", True) is not told
        parsed = DeepSpeedConfig(written)
        assert parsed.zero_force_ds_cpu_optimizer is not told


def test_the_loss_scale_is_written_as_it_was_asked_for() -> None:
    """The five keys, by DeepSpeed's names; other precisions have none."""
    asked = {"initial_scale_power": 12, "loss_scale_window": 100, "hysteresis": 2}
    launch = {"preset": "zero2", "mixed_precision": "fp16", "fp16": asked}
    written = resolve(launch).derived.deepspeed["fp16"]
    assert written == {"enabled": True, "loss_scale": 0.0, "min_loss_scale": 1, **asked}
    parsed = DeepSpeedConfig(dict(resolve(launch).derived.deepspeed)).float16_config
    assert parsed.dynamic_loss_scale_args()["init_scale"] == 4096
    assert resolve("zero2").derived.deepspeed["fp16"] == {"enabled": False}
