"""A LoRA whose fused layers share a factor: under the engines, over a switch, and exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import load_file
from tests.training.conftest import Training, trained_model
from tests.training.inputs import COUNT, SIDE
from tests.training.matrix import deviation

from zerotrain.cache import read_cache, stacked
from zerotrain.config.adapters import stack_of
from zerotrain.config.training import TrainConfig
from zerotrain.export.export import export
from zerotrain.export.formats.conversion import convert
from zerotrain.export.target import WeightsTarget
from zerotrain.models.families import load_family
from zerotrain.state.checkpoint import Checkpoint
from zerotrain.state.position import MASTER
from zerotrain.training.checkpointing import progress_folder

LORA: dict[str, Any] = {
    "rank": 4, "alpha": 8.0, "dropout": 0.0, "fused_layers": True,
    "target_modules": ["to_q", "to_k", "to_v", "add_q_proj", "proj_mlp", "ff.net.2"],
}  # fmt: skip
STEPS = 2
FAMILY: Any = load_family("flux")


class Runs:
    """Trainings of a nano Flux."""

    def __init__(self, inputs: Path, training: Training) -> None:
        self.inputs, self.training = inputs, training
        self.base = inputs / "base"

    def run(self, name: str, preset: str, until: int, **changes: Any) -> list[float]:
        """Train to a step; the losses so far."""
        return self.training.run(
            name, preset, until, family="flux", lora=LORA, resolution=SIDE, epoch_size=COUNT,
            objective=TrainConfig().objective("flux"), lr_warmup_steps=0, lr_scheduler_steps=9,
            use_ema=True, ema_decay=0.5, ema_update_interval=1, ema_device="accelerator",
            **changes,
        )  # fmt: skip

    def rolling(self, name: str, step: int) -> Path:
        """The checkpoint at a step."""
        return progress_folder.step_folder(self.training.progress(name), step)

    def export(self, name: str, step: int, *, ema: bool = False) -> tuple[Path, Path]:
        """Weights and state of a step."""
        rolling, folder = self.rolling(name, step), self.training.folder
        weights, state = folder / f"{name}-weights", folder / f"{name}-state"
        target = WeightsTarget(weights, self.base, FAMILY, "fp32", lora=LORA, ema=ema)
        export(Checkpoint(rolling), rolling, target, state)
        return weights, state

    @torch.no_grad()
    def answers(self, model: torch.nn.Module) -> torch.Tensor:
        """Velocities of three cached samples."""
        cache = read_cache(self.inputs / "cache")
        batch = stacked([cache.sample(i) for i in range(3)], torch.device("cpu"))
        objective = FAMILY.objective(self.base)
        found: torch.Tensor = objective.predict(
            model, batch["latents"], torch.full((3,), 500.0), batch
        )
        return found


@pytest.fixture
def runs(image_inputs, tmp_path, server) -> Runs:
    inputs = image_inputs("flux")
    return Runs(inputs, Training(tmp_path, inputs, server))


@pytest.mark.slow
def test_it_switches_and_every_export_answers_as_what_was_trained(runs, tmp_path):
    """From plain PyTorch to ZeRO-3; the library's file has A for each layer."""
    whole = runs.run("whole", "torch", 2 * STEPS)
    runs.run("first", "torch", STEPS)
    _, state = runs.export("first", STEPS)
    losses = runs.run("second", "zero3", 2 * STEPS, state=state)
    assert deviation(losses, whole) <= 1e-6
    checkpoint = Checkpoint(runs.rolling("second", 2 * STEPS))
    firsts = [name.partition(".lora_A.")[0] for name in checkpoint.names if ".lora_A." in name]
    assert len({*map(stack_of, firsts)}) == len(firsts) < len(checkpoint.names) / 2
    weights, _ = runs.export("second", 2 * STEPS)
    trained = trained_model("flux", runs.base, runs.rolling("second", 2 * STEPS), LORA)
    pipeline = diffusers.FluxPipeline.from_pretrained(weights)
    pipeline.load_lora_weights(weights)
    answers = runs.answers(trained)
    assert torch.equal(runs.answers(pipeline.transformer), answers)
    convert(weights, "peft", tmp_path / "peft")
    found = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert len(found) == 2 * len([name for name in checkpoint.names if ".lora_B." in name])
    convert(weights, "merged", tmp_path / "merged")
    merged = FAMILY.load_model(tmp_path / "merged").eval()
    assert (runs.answers(merged) - answers).abs().max() <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["torch", "zero1", "zero2", "zero3", "zero3_offload"])
def test_two_processes_train_the_same_under_every_engine(runs, preset):
    """Losses, norms, weights and average are those of one process of plain PyTorch, to 1e-5, though
    they compute blocks again, and offloaded parts of a model are never whole."""
    whole = runs.run("whole", "torch", STEPS)
    losses = runs.run(
        preset, preset, STEPS, num_processes=2, gradient_checkpointing=True,
        zero3_init=preset == "zero3_offload",
    )  # fmt: skip
    assert deviation(losses, whole) <= 1e-5
    norms = [
        [line["grad_norm"] for line in runs.training.log(name) if "grad_norm" in line]
        for name in (preset, "whole")
    ]
    assert norms[0]
    assert deviation(*norms) <= 1e-5
    one, two = (Checkpoint(runs.rolling(name, STEPS)) for name in ("whole", preset))
    assert {*one.names} == {*two.names}
    for name in one.names:
        for slot in (MASTER, "ema"):
            apart = (one.tensor(name, slot) - two.tensor(name, slot)).abs().max()
            assert apart <= 1e-5, (name, slot)
