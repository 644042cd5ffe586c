"""A LoRA next to a quantized base: under every engine that takes it, over switches and resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.training.conftest import Training
from tests.training.inputs import LORA as TO_QKV
from tests.training.inputs import image_values, text_inputs
from tests.training.matrix import deviation

from zerotrain.models.families import load_family

LORA = {"rank": 4, "alpha": 8.0, "dropout": 0.0, "target_modules": None}
NF4: dict[str, Any] = {"lora": LORA, "base_model_precision": "nf4"}


@pytest.mark.slow
def test_the_same_bits_under_plain_pytorch_and_zero(training: Training) -> None:
    """On one process in fp32; it is another training than that next to the full weights."""
    plain = training.run("plain", "torch", 6, **NF4)
    apart = deviation(plain, training.run("full", "torch", 6, lora=LORA))
    print(f"nf4 against full precision: {apart:.1e}")
    assert 1e-5 < apart < 0.1
    assert training.run("zero2", "zero2", 6, **NF4) == plain
    assert deviation(training.run("offload", "zero2_offload", 6, **NF4), plain) <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["torch", "zero2"])
def test_two_processes_train_as_one(training: Training, preset: str) -> None:
    """Codes are quantized in each process, from the same weights."""
    alone = training.run("alone", preset, 6, **NF4)
    both = training.run("both", preset, 6, num_processes=2, **NF4)
    assert deviation(both, alone) <= 1e-5


@pytest.mark.slow
def test_a_switch_and_a_resume_lose_nothing(training: Training) -> None:
    """A resume gives the same bits; ZeRO-2 continues from the state of plain PyTorch."""
    changes = {**NF4, "save_every": 4}
    whole = training.assert_resumes("torch", 4, 8, **changes)
    state = training.export_state("whole", 4)
    switched = training.run("zero2", "zero2", 8, state=state, **changes)
    assert switched == whole


@pytest.mark.slow
def test_dora_goes_with_it(training: Training) -> None:
    """Under two engines alike, and as another training."""
    changes = {**NF4, "lora": {**LORA, "use_dora": True}}
    plain = training.run("plain", "torch", 4, **NF4)
    changed = training.run("changed", "torch", 4, **changes)
    assert changed != plain
    assert training.run("zero2", "zero2", 4, **changes) == changed


@pytest.mark.slow
def test_integers_train_alike_and_resume(training: Training) -> None:
    """With recomputed blocks: the same bits under two engines and resumed."""
    changes = {**NF4, "base_model_precision": "int8-quanto", "gradient_checkpointing": True}
    plain = training.assert_resumes("torch", 2, 4, **changes)
    apart = deviation(plain, training.run("full", "torch", 4, lora=LORA))
    assert 1e-6 < apart < 1.0
    assert training.run("zero2", "zero2", 4, **changes) == plain


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sdxl", "causal_lm"])
def test_a_family_of_each_modality_trains(
    family: str, image_inputs: Any, tmp_path: Path, server: Any
) -> None:
    """Under bf16 of ZeRO-2 and of autocast alike, but for rounding; and the adapter is exported."""
    if family == "sdxl":
        inputs, lora, values = image_inputs(family), TO_QKV, image_values(family)
    else:
        inputs, lora = text_inputs(family, tmp_path / "inputs", packing=False), LORA
        values = {"family": family, "objective": {}, "epoch_size": 16}
    training = Training(tmp_path, inputs, server)
    changes = {**values, **NF4, "lora": lora, "mixed_precision": "bf16"}
    losses = training.run("torch", "torch", 4, **changes)
    assert deviation(training.run("zero2", "zero2", 4, **changes), losses) <= 5e-3
    weights, _ = training.export("zero2", 4, family, lora=lora)
    load_family(family).load_trained(weights)
