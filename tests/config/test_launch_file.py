"""A phase may point at a file of accelerate or DeepSpeed instead of naming a preset."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.builders.runs import make_config

from zerotrain.config.run import RunConfig
from zerotrain.errors import PipelineError

FILE = {
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"},
                          "reduce_bucket_size": 1000},
    "gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0.5, "bf16": {"enabled": "auto"}, "train_batch_size": "auto",
}  # fmt: skip


def parsed(launch: Any, **train: Any) -> RunConfig:
    """A run whose one phase has this launch."""
    return make_config(
        train=train,
        launch={"num_processes": 2, "mixed_precision": "bf16"},
        phases=[{"name": "a", "until": 10, "launch": launch}],
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A DeepSpeed JSON."""
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(FILE))
    return path


def test_the_files_values_are_the_phases(file: Path) -> None:
    """Preset, batch and clipping; what it leaves open is the run's."""
    for launch in (str(file), {"preset": str(file), "num_cpu_threads_per_process": 3}):
        phase = parsed(launch).phase("a")
        assert phase.launch.preset == "zero2_offload"
        assert (phase.launch.num_processes, phase.launch.mixed_precision) == (2, "bf16")
        assert phase.launch.deepspeed == {"zero_optimization": {"reduce_bucket_size": 1000}}
        assert (phase.train.global_batch_size, phase.train.max_grad_norm) == (16, 0.5)
        assert phase.train.gradient_accumulation_steps == 2
    assert phase.launch.num_cpu_threads_per_process == 3


def test_both_have_to_say_the_same(file: Path) -> None:
    """Neither is passed over in silence."""
    assert parsed(str(file), global_batch_size=16).phase("a").train.global_batch_size == 16
    with pytest.raises(PipelineError, match=r"max_grad_norm 0\.5, but the run says 1\.0"):
        parsed(str(file), max_grad_norm=1.0)


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    """With its name."""
    with pytest.raises(PipelineError, match=r"gone\.json"):
        parsed(str(tmp_path / "gone.json"))


def test_phases_of_plain_pytorch_do_not_inherit_what_is_zeros() -> None:
    """A run's own keys for DeepSpeed go to its ZeRO phases; a phase's own are the phase's."""
    plain, zero = (
        phase.launch
        for phase in make_config(
            launch={"num_processes": 2, "deepspeed": {"communication_data_type": "fp32"}},
            phases=[
                {"name": "a", "until": 1, "global_batch_size": 2, "launch": "torch"},
                {"name": "b", "until": 2, "global_batch_size": 2, "launch": "zero2"},
            ],
        ).phases
    )
    assert (plain.deepspeed, plain.num_processes) == ({}, 2)
    assert zero.deepspeed == {"communication_data_type": "fp32"}
