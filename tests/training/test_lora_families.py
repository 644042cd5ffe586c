"""The adapter of a ZeRO-3 run has the names and shapes of the plain one's, in every format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.training.conftest import Training
from tests.training.inputs import LORA, image_values
from tests.training.matrix import deviation

from zerotrain.export.formats.conversion import convert

FORMATS = {
    "diffusers_lora": "pytorch_lora_weights.safetensors",
    "peft": "adapter_model.safetensors",
    "kohya": "lora.safetensors",
}
STEPS = 2


Weights = Callable[..., Path]


@pytest.fixture
def weights(request, image_training) -> Weights:
    """Trains two steps of a family's adapter under an engine; the weights folder."""
    family = getattr(request, "param", "sdxl")
    training = image_training(family)

    def train(preset: str, **changes: Any) -> Path:
        values = {**image_values(family), "lora": LORA, "lr_warmup_steps": 0, **changes}
        training.run(preset, preset, STEPS, **values)
        return training.export(preset, STEPS, family, lora=LORA)[0]

    return train


@pytest.mark.slow
@pytest.mark.parametrize(
    "weights",
    [
        pytest.param("sdxl", marks=pytest.mark.soak),
        "sd3",
        pytest.param("qwen_image", marks=pytest.mark.soak),
    ],
    indirect=True,
)
def test_the_adapter_of_a_zero3_run_is_that_of_a_plain_one(weights, tmp_path):
    """Equal names, shapes and types in every format, never empty, and values within 1e-4."""
    folders = {preset: weights(preset) for preset in ("torch", "zero3_offload")}
    for form, file in FORMATS.items():
        found = []
        for preset, folder in folders.items():
            convert(folder, form, tmp_path / f"{preset}-{form}")
            found.append(load_file(tmp_path / f"{preset}-{form}" / file))
        plain, partitioned = found
        assert len(plain) >= 2 * len(LORA["target_modules"])
        described = [{n: (t.shape, t.dtype) for n, t in tensors.items()} for tensors in found]
        assert described[0] == described[1]
        assert all(t.numel() for t in partitioned.values())
        ups = [n for n in partitioned if n.endswith((".lora_B.weight", ".lora_up.weight"))]
        assert all(partitioned[name].any() for name in ups)
        apart = max(float((plain[n] - partitioned[n]).abs().max()) for n in plain)
        print(f"{form}: {len(plain)} tensors, {apart:.1e} apart")
        assert apart <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("option", ["use_dora", pytest.param("use_rslora", marks=pytest.mark.soak)])
def test_an_option_means_the_same_under_every_engine(training: Training, option: str) -> None:
    """DoRA reads the base's weights in each pass, which ZeRO-3 has taken apart."""
    plain = {**LORA, "target_modules": None}
    lora = {**plain, option: True}
    whole = training.run("whole", "torch", 4, lora=lora)
    assert deviation(whole, training.run("other", "torch", 4, lora=plain)) > 1e-6
    for preset in ("zero2_offload", "zero3", "zero3_offload"):
        assert deviation(training.run(preset, preset, 4, lora=lora), whole) <= 1e-6
