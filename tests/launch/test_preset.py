"""A preset file says what it may say, and nothing of it is passed over in silence."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.builders.refusals import refusal

from zerotrain.errors import PipelineError
from zerotrain.launch.preset import Preset, read_preset

SHIPPED = Path(__file__).parents[2] / "config" / "launch"


def test_shipped_presets_are_what_their_names_say() -> None:
    """Engine, stage, optimizer offload, parameter offload."""
    found = {path.stem: read_preset(path) for path in SHIPPED.glob("*.yaml")}
    order = ("torch", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload", "zero3_nvme")
    assert found == {
        "torch": Preset("torch", "torch"),
        "zero1": Preset("zero1", "deepspeed", 1),
        "zero2": Preset("zero2", "deepspeed", 2),
        "zero2_offload": Preset("zero2_offload", "deepspeed", 2, "cpu"),
        "zero3": Preset("zero3", "deepspeed", 3),
        "zero3_offload": Preset("zero3_offload", "deepspeed", 3, "cpu", "cpu"),
        "zero3_nvme": Preset("zero3_nvme", "deepspeed", 3, "nvme", "nvme"),
        "auto": Preset("auto", "auto", choose=order),
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("engine: jax", "engine 'jax' with engine 'jax'"),
        ("engine: torch\nstage: 2", "unknown keys stage"),
        ("engine: torch\nzero_stage: 2", "engine 'torch' with zero_stage 2"),
        ("engine: torch\noffload_optimizer: cpu", "engine 'torch' with offload_optimizer 'cpu'"),
        ("engine: deepspeed", "engine 'deepspeed' with zero_stage None"),
        ("engine: deepspeed\nzero_stage: 0", "engine 'deepspeed' with zero_stage 0"),
        ("engine: deepspeed\nzero_stage: 2\nchoose: [torch]", "with choose ['torch']"),
        ("engine: deepspeed\nzero_stage: 2\noffload_optimizer: auto", "offload_optimizer 'auto'"),
        ("engine: auto", "engine 'auto' with choose None"),
        ("engine: auto\nchoose: []", "engine 'auto' with choose []"),
        ("engine: auto\nchoose: [1]", "engine 'auto' with choose [1]"),
        ("- engine", "holds a list, not keys"),
        ("", "holds null, not keys"),
        ("engine: [", "not valid YAML: "),
        (
            "engine: deepspeed\nzero_stage: 2\noffload_param: cpu",
            "offload_param is cpu under ZeRO stage 2, which cannot do that: it needs ZeRO stage 3",
        ),
        (
            "engine: deepspeed\nzero_stage: 2\noffload_optimizer: nvme",
            "offload_optimizer is nvme under ZeRO stage 2, which cannot do that",
        ),
    ],
)
def test_bad_presets_are_refused(tmp_path: Path, text: str, message: str) -> None:
    """With the file, the value and what a preset holds."""
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(PipelineError) as caught:
        read_preset(tmp_path / "mine.yaml")
    assert f"{tmp_path / 'mine.yaml'}: " in str(caught.value)
    assert message in str(caught.value)


def test_a_missing_preset_is_refused() -> None:
    """Those that there are stand in the hint."""
    text = refusal(read_preset, SHIPPED / "zero9.yaml")
    assert "zero9.yaml: no such launch preset" in text
    assert "auto, torch, zero1, zero2, zero2_offload" in text
