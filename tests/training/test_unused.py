"""Trained parameters that the loss does not depend on are named, and train under DDP as well."""

from __future__ import annotations

import pytest
import torch
from tests.training.conftest import Training
from tests.training.inputs import image_values

from zerotrain.state.position import MASTER
from zerotrain.training.checks import _is_expected

NAMED = "the loss does not depend on 2 of the trained parameters: forgotten.bias, forgotten.weight"
LOOKS = "DDP looks for them at every step"
TARGETS = (
    "to_q,to_k,to_v,add_q_proj,add_k_proj,add_v_proj,to_out.0,to_add_out,img_mlp.net.2,img_mod.1,"
    "txt_mlp.net.2,txt_mod.1"
)
"""Of DiffSynth-Studio's command for Qwen-Image, which sets --find_unused_parameters."""
slow = pytest.mark.slow


@pytest.mark.parametrize("preset", ["torch", "zero2", pytest.param("zero3_offload", marks=slow)])
def test_unused_parameters_are_named(training, preset):
    """Once, at the first step of a start; the training continues, and says how they change."""
    training.run("a", preset, 3, family="unused", gradient_accumulation_steps=2)
    said = training.output.read_text()
    assert said.count(f"{NAMED}; weight decay alone changes them") == 1
    assert "frozen_parameters" in said


def test_unused_parameters_are_none_of_an_ordinary_model(training):
    """Every preset's first step reaches every parameter of a U-Net, and of an adapter."""
    for preset in ("torch", "zero2_offload"):
        training.run(preset, preset, 1)
    assert "does not depend" not in training.output.read_text()


@pytest.mark.slow
def test_ddp_looks_for_unused_parameters_by_itself(training):
    """Its first step is made again, and the weights are those of a training that was asked to look
    from its start, bit by bit, and those of one process but for the order of sums."""
    changes = {"family": "unused", "max_grad_norm": 0.0, "gradient_accumulation_steps": 2}
    training.run("two", "torch", 3, num_processes=2, **changes)
    assert training.output.read_text().count(f"{NAMED}; {LOOKS}") == 1
    training.run("told", "torch", 3, num_processes=2, find_unused_parameters=True, **changes)
    training.run("one", "torch", 3, find_unused_parameters=True, **changes)
    assert training.output.read_text().count(NAMED) == 1
    assert training.hashes("two", 3) == training.hashes("told", 3)
    assert training.losses("two") == training.losses("told")
    assert apart(training, "two", "one") <= 2e-6


@pytest.mark.slow
def test_a_resume_looks_for_unused_parameters_again(training):
    """A training that was stopped after a step ends in the same bits."""
    training.assert_resumes("torch", 1, 3, family="unused", num_processes=2, max_grad_norm=0.0)


@pytest.mark.slow
def test_the_reference_targets_of_qwen_image_train_under_ddp(image_training):
    """Adapters on both streams of every block: the last block's text stream reaches no loss."""
    training = image_training("qwen_image")
    lora = {"rank": 4, "alpha": 4.0, "dropout": 0.0, "target_modules": TARGETS.split(",")}
    changes = {
        **image_values("qwen_image"), "lora": lora, "lr_warmup_steps": 0, "max_grad_norm": 0.0,
        "gradient_checkpointing": True,
    }  # fmt: skip
    training.run("two", "torch", 3, num_processes=2, **changes)
    said = training.output.read_text()
    text_stream = (
        "parameters of the last block's text stream get no gradient, as in every qwen_image"
    )
    assert said.count(f"{text_stream} model; {LOOKS}\n") == 1
    assert "the loss does not depend" not in said
    training.run("one", "torch", 3, **changes)
    assert apart(training, "two", "one") <= 1e-6


@pytest.mark.parametrize(
    ("family", "names", "expected"),
    [
        ("qwen_image", ["1.attn.to_add_out.weight", "1.txt_mlp.net.2.lora_A.default.weight"], True),
        ("qwen_image", ["0.attn.to_add_out.weight", "1.attn.to_add_out.weight"], False),
        ("qwen_image", ["1.attn.to_add_out.weight", "1.attn.to_q.weight"], False),
        ("flux", ["1.attn.to_add_out.weight"], False),
        ("unused", ["1.attn.to_add_out.weight"], False),
    ],
)
def test_only_what_every_model_of_the_family_leaves_is_expected(family, names, expected):
    """Of one block, of the family that says so."""
    assert _is_expected([f"transformer_blocks.{name}" for name in names], family) == expected


def apart(training: Training, one: str, other: str) -> float:
    """The distance of two trainings' weights, relative to their norm."""
    first, second = (training.checkpoint(name, 3) for name in (one, other))
    assert first.names == second.names
    whole = [torch.cat([found.tensor(name, MASTER).flatten() for name in first.names])
             for found in (first, second)]  # fmt: skip
    return float((whole[0] - whole[1]).norm() / whole[1].norm())
