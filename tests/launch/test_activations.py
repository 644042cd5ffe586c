"""What a launch may ask of activations, and what is refused with a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.builders.refusals import refusal
from tests.builders.runs import make_config

from zerotrain.config.stage_settings import LaunchSettings
from zerotrain.launch.files import write_launch_files
from zerotrain.launch.preset import read_preset
from zerotrain.launch.resolve import resolve_phase
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.models.sizes import model_sizes

SIZES = model_sizes({"a.weight": [100, 100]})

PRESETS = Path(__file__).parents[2] / "config" / "launch"


def resolve(preset: str, launch: dict[str, Any], *, checkpointing: bool = True) -> ResolvedPhase:
    """A phase under this launch."""
    settings = LaunchSettings.of(
        make_config(
            train={"gradient_checkpointing": checkpointing},
            phases=[{"name": "a", "until": 9, "launch": {"preset": preset, **launch}}],
        ),
        "a",
    )
    return resolve_phase(settings, read_preset(PRESETS / f"{preset}.yaml"), 100, SIZES)


@pytest.mark.parametrize("preset", ["torch", "zero1", "zero2_offload", "zero3", "zero3_offload"])
def test_cpu_checkpointing_is_for_every_preset(preset: str) -> None:
    """It changes no number, so progress of before continues under it."""
    found = resolve(preset, {"cpu_checkpointing": True})
    assert found.launch.cpu_checkpointing
    assert found.sources["cpu_checkpointing"] == ("user", "")
    assert found.numbers() == resolve(preset, {}).numbers()


def test_deepspeeds_file_has_the_section(tmp_path: Path) -> None:
    """With what was asked for; accelerate's file names zero3_init_flag."""
    asked = {"cpu_checkpointing": True, "partition_activations": True, "zero3_init": True}
    write_launch_files(resolve("zero3", asked), tmp_path, tmp_path)
    written = json.loads((tmp_path / "deepspeed.json").read_text())
    assert written["activation_checkpointing"] == {
        "partition_activations": True,
        "cpu_checkpointing": True,
        "contiguous_memory_optimization": False,
    }
    assert "zero3_init_flag: true" in (tmp_path / "accelerate.yaml").read_text()


def test_partition_activations_says_that_it_shards_nothing() -> None:
    """It is taken, since files in use have it, and run.yaml has the reason."""
    source, reason = resolve("zero2", {"partition_activations": True}).sources[
        "partition_activations"
    ]
    assert source == "user"
    assert "model parallelism, of which there is one here: nothing is sharded" in reason


@pytest.mark.parametrize(
    ("preset", "launch", "checkpointing", "message"),
    [
        ("torch", {"cpu_checkpointing": True}, False,
         "launch.cpu_checkpointing is about what gradient checkpointing keeps, but "
         "train.gradient_checkpointing is false"),
        ("zero2", {"partition_activations": True}, False, "launch.partition_activations is about"),
        ("zero2", {"contiguous_memory_optimization": True}, True, "expandable_segments:True"),
        ("torch", {"partition_activations": True}, True, "but preset torch is plain PyTorch"),
        ("zero2", {"zero3_init": True}, False, "but under preset zero2 every process holds all"),
        ("torch", {"zero3_init": True}, False, "choose a preset of ZeRO stage 3"),
    ],
)  # fmt: skip
def test_what_would_do_nothing_is_refused(
    preset: str, launch: dict[str, Any], checkpointing: bool, message: str
) -> None:
    """In a sentence with the way out."""
    assert message in refusal(resolve, preset, launch, checkpointing=checkpointing)
