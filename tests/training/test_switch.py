"""The switch: a phase that goes on from a state goes on as if nothing had happened."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from zerotrain import artifact
from zerotrain.checkpoint import Checkpoint
from zerotrain.state import State, write_state

STEPS, SWITCH = 14, 7
BOUND = {"torch": 1e-5, "zero2_offload": 1e-5}


def export(checkpoint: Path, state: Path) -> Path:
    """The state half of export_weights."""
    found = Checkpoint(checkpoint)
    with artifact.publish(state, "state") as draft:
        write_state(draft.folder, found.position, found.names, found.slots, found.tensor)
        records = draft.folder / "records"
        records.mkdir()
        for name in ("training_log.jsonl", "resources.json"):
            (records / name).write_bytes(found.artifact.path(f"records/{name}").read_bytes())
    return state


def deviation(losses: list[float], reference: list[float]) -> float:
    """Largest relative difference over equally many steps."""
    assert len(losses) == len(reference)
    return max(abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True))


@pytest.fixture
def uninterrupted(training) -> list[float]:
    """Losses of plain PyTorch without a switch."""
    return training.run("whole", "torch", STEPS)


@pytest.mark.parametrize(
    ("first", "second"),
    [("torch", "zero2_offload"), ("zero2_offload", "torch"), ("torch", "torch")],
)
def test_switch_keeps_the_losses(training, uninterrupted, first, second):
    """Losses over a switch stay within 1e-5 of the uninterrupted run; without engines in between,
    they are the same bits."""
    training.run("first", first, SWITCH)
    state = export(training.progress("first") / f"step-{SWITCH:08d}", training.folder / "state")
    losses = training.run("second", second, STEPS, state=state)
    apart = deviation(losses, uninterrupted)
    print(f"{first} -> {second}: largest relative deviation {apart:.1e}")
    if first == second == "torch":
        assert losses == uninterrupted
    assert apart <= 1e-5


def test_switch_without_moments_would_be_noticed(training, uninterrupted):
    """Weights alone are not enough: dropped moments move the losses far beyond the bound."""
    training.run("first", "torch", SWITCH)
    state = export(training.progress("first") / f"step-{SWITCH:08d}", training.folder / "state")
    with artifact.publish(training.folder / "forgetful", "state") as draft:
        for name in artifact.read(state, "state").files:
            target = draft.folder / name
            target.parent.mkdir(exist_ok=True)
            if name.startswith("exp_avg"):
                zeros = {k: torch.zeros_like(v) for k, v in load_file(state / name).items()}
                save_file(zeros, target)
            else:
                target.write_bytes((state / name).read_bytes())
    losses = training.run("second", "zero2_offload", STEPS, state=training.folder / "forgetful")
    assert deviation(losses, uninterrupted) > 1e-3


def test_switch_carries_the_position(training):
    """Step, sampler, schedule and optimizer count cross the switch; the log goes on."""
    training.run("first", "torch", SWITCH)
    state = export(training.progress("first") / f"step-{SWITCH:08d}", training.folder / "state")
    training.run("second", "zero2_offload", STEPS, state=state, global_batch_size=6,
                 micro_batch_size=6)  # fmt: skip
    position = Checkpoint(training.progress("second") / f"step-{STEPS:08d}").position
    assert position.step == position.optimizer_step == STEPS
    assert position.samples == SWITCH * 4 + (STEPS - SWITCH) * 6
    assert position.lr_scheduler_steps == 16
    assert position.engine["zero_stage"] == 2
    assert [line["step"] for line in training.log("second")] == list(range(1, STEPS + 1))
    assert {line["phase"] for line in training.log("second")} == {"first", "second"}


def test_switch_state_equals_the_checkpoint(training):
    """Each engine's fragments give the model's own parameters: names, shapes and, at a switch, the
    very weights that the next engine starts from."""
    training.run("first", "zero2_offload", SWITCH)
    rolling = training.progress("first") / f"step-{SWITCH:08d}"
    state = State(export(rolling, training.folder / "state"))
    shapes = json.loads((rolling / "checkpoint.json").read_text())["parameters"]
    unet = load_file(training.base / "unet" / "diffusion_pytorch_model.safetensors")
    assert {name: list(tensor.shape) for name, tensor in unet.items()} == shapes
    for name in state.names:
        for slot in state.slots:
            assert list(state.tensor(name, slot).shape) == shapes[name]
        assert not torch.equal(state.tensor(name, "master"), unet[name])
