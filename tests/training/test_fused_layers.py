"""A LoRA whose fused layers share a factor: under the engines, over a switch, and exported."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import load_file
from tests.training.conftest import Training, trained_model
from tests.training.inputs import answer_samples, image_values
from tests.training.matrix import deviation

from zerotrain.config.adapters import stack_of
from zerotrain.export.command import convert
from zerotrain.models.families import load_family
from zerotrain.state.position import MASTER

LORA: dict[str, Any] = {
    "rank": 4, "alpha": 8.0, "dropout": 0.0, "fused_layers": True,
    "target_modules": ["to_q", "to_k", "to_v", "add_q_proj", "proj_mlp", "ff.net.2"],
}  # fmt: skip
STEPS = 2
FAMILY: Any = load_family("flux")


VALUES: dict[str, Any] = {
    **image_values("flux"), "lora": LORA, "lr_warmup_steps": 0, "lr_scheduler_steps": 9,
    "use_ema": True, "ema_decay": 0.5, "ema_update_interval": 1, "ema_device": "accelerator",
}  # fmt: skip


def answers(training: Training, model: torch.nn.Module) -> torch.Tensor:
    """Velocities of three cached samples."""
    return answer_samples("flux", training.base.parent, training.base, model)


@pytest.fixture
def training(image_training) -> Training:
    """A run of a nano Flux."""
    return image_training("flux")


@pytest.mark.slow
def test_it_switches_and_every_export_answers_as_what_was_trained(training, tmp_path):
    """From plain PyTorch to ZeRO-3; the library's file has A for each layer."""
    whole = training.run("whole", "torch", 2 * STEPS, **VALUES)
    training.run("first", "torch", STEPS, **VALUES)
    state = training.export_state("first", STEPS)
    losses = training.run("second", "zero3", 2 * STEPS, state=state, **VALUES)
    assert deviation(losses, whole) <= 1e-6
    checkpoint = training.checkpoint("second", 2 * STEPS)
    firsts = [name.partition(".lora_A.")[0] for name in checkpoint.names if ".lora_A." in name]
    assert len({*map(stack_of, firsts)}) == len(firsts) < len(checkpoint.names) / 2
    weights, _ = training.export("second", 2 * STEPS, "flux", lora=LORA, ema=False)
    trained = trained_model("flux", training.base, checkpoint.artifact.folder, LORA)
    pipeline = diffusers.FluxPipeline.from_pretrained(weights)
    pipeline.load_lora_weights(weights)
    expected = answers(training, trained)
    assert torch.equal(answers(training, pipeline.transformer), expected)
    convert(weights, "peft", tmp_path / "peft")
    found = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert len(found) == 2 * len([name for name in checkpoint.names if ".lora_B." in name])
    convert(weights, "merged", tmp_path / "merged")
    merged = FAMILY.load_model(tmp_path / "merged").eval()
    assert (answers(training, merged) - expected).abs().max() <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["torch", "zero3_offload"])
def test_two_processes_train_the_same_under_every_engine(training, preset):
    """Also where blocks are computed again, and where a model is never whole."""
    whole = training.run("whole", "torch", STEPS, **VALUES)
    losses = training.run(
        preset, preset, STEPS, num_processes=2, gradient_checkpointing=True,
        zero3_init=preset == "zero3_offload", **VALUES,
    )  # fmt: skip
    assert deviation(losses, whole) <= 1e-5
    norms = [
        [line["grad_norm"] for line in training.log(name) if "grad_norm" in line]
        for name in (preset, "whole")
    ]
    assert norms[0]
    assert deviation(*norms) <= 1e-5
    one, two = (training.checkpoint(name, STEPS) for name in ("whole", preset))
    assert {*one.names} == {*two.names}
    for name in one.names:
        for slot in (MASTER, "ema"):
            apart = (one.tensor(name, slot) - two.tensor(name, slot)).abs().max()
            assert apart <= 1e-5, (name, slot)
