"""The switch: a phase that goes on from a state goes on as if nothing had happened."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.training.conftest import Training
from tests.training.matrix import Matrix, covering, deviation, export, fp32_pairs, sampled
from tests.training.test_resume import wait_for_step

from zerotrain import artifact
from zerotrain.checkpoint import Checkpoint
from zerotrain.state import State, write_state
from zerotrain.training import progress_folder

STEPS, SWITCH = 14, 7


@pytest.fixture(scope="session")
def matrix(tmp_path_factory, inputs, server, request) -> Iterator[Matrix]:
    """Uninterrupted runs, made once; with --fix the page of figures is written at the end."""
    found = Matrix(Training(tmp_path_factory.mktemp("matrix"), inputs, server))
    yield found
    everything = {*fp32_pairs(), *covering()} <= found.measured.keys()
    if request.config.getoption("--fix") and everything:
        found.write(Path("docs/switching.md"))


def _cases() -> list[Any]:
    later = [switch for switch in covering() if switch not in sampled()]
    return [
        *(pytest.param(switch, id=str(switch)) for switch in [*fp32_pairs(), *sampled()]),
        *(pytest.param(switch, id=str(switch), marks=pytest.mark.slow) for switch in later),
    ]


@pytest.mark.parametrize("switch", _cases())
def test_switch_matrix_keeps_the_losses(matrix, switch):
    """10 steps, a switch, 10 steps: the losses are those of a run without a switch, within the
    bound of the pair; bit by bit where neither rounding nor the order of sums differs."""
    apart = matrix.deviation(switch)
    print(f"{switch}: largest relative deviation {apart:.1e}, bound {switch.bound:.0e}")
    assert apart <= switch.bound


@pytest.fixture
def uninterrupted(training) -> list[float]:
    """Losses of plain PyTorch without a switch."""
    return training.run("whole", "torch", STEPS)


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


def test_switch_chain_of_five_ends_as_close_as_one(training):
    """torch, ZeRO-1, ZeRO-3 offload, ZeRO-2, ZeRO-2 offload, torch again: 4 steps each; errors do
    not add up."""
    chain = ["torch", "zero1", "zero3_offload", "zero2", "zero2_offload", "torch"]
    whole = training.run("whole", "torch", 4 * len(chain))
    state, losses = None, []
    for number, preset in enumerate(chain, start=1):
        name = f"part{number}"
        losses = training.run(name, preset, 4 * number, state=state)
        rolling = training.progress(name) / f"step-{4 * number:08d}"
        state = export(rolling, training.folder / f"state{number}")
    apart = deviation(losses, whole)
    print(f"five switches: largest relative deviation {apart:.1e}")
    assert apart <= 1e-6


def test_switch_of_a_killed_phase_repeats_nothing_that_was_saved(training):
    """A phase of 800 steps, killed at 300 and switched: it ends as the uninterrupted one, and no
    step before the last complete checkpoint is trained twice."""
    shape = {"save_every": 100, "lr_scheduler_steps": 800, "keep": 20}
    whole = training.run("whole", "torch", 800, **shape)
    training.phase("cut", "torch", 800, **shape)
    process = training.start("cut")
    wait_for_step(training, "cut", 300)
    process.kill()
    process.join()
    step = progress_folder.newest_step(training.progress("cut"), 800)
    assert step in (200, 300, 400)  # the log may be ahead of a save, and the kill behind the log
    rolling = progress_folder.step_folder(training.progress("cut"), step)
    state = export(rolling, training.folder / "state")
    losses = training.run("goes on", "zero2_offload", 800, state=state, **shape)
    lines = training.log("goes on")
    assert [line["step"] for line in lines] == list(range(1, 801))
    assert [line["phase"] for line in lines] == ["cut"] * step + ["goes on"] * (800 - step)
    assert losses[:step] == whole[:step]
    apart = deviation(losses, whole)
    print(f"killed at {step} of 800 and switched: largest relative deviation {apart:.1e}")
    assert apart <= 1e-6


def test_switch_between_fp16_engines_keeps_the_loss_scale(training):
    """A scale that an overflow has lowered crosses the switch, with the steps since then."""
    shape = {"mixed_precision": "fp16"}
    training.run("first", "torch", SWITCH, **shape)
    rolling = training.progress("first") / f"step-{SWITCH:08d}"
    before = Checkpoint(rolling).position
    state = export(rolling, training.folder / "state")
    document = json.loads((state / "state.json").read_text())
    with artifact.publish(training.folder / "lowered", "state") as draft:
        for name in artifact.read(state, "state").files:
            target = draft.folder / name
            target.parent.mkdir(exist_ok=True)
            target.write_bytes((state / name).read_bytes())
        document["loss_scale"] = {"scale": 512.0, "good_steps": 3}
        artifact.write_json(draft.folder / "state.json", document)
    training.run("second", "zero2", SWITCH + 2, state=training.folder / "lowered", **shape)
    after = Checkpoint(training.progress("second") / f"step-{SWITCH + 2:08d}").position
    assert before.loss_scale["good_steps"] == SWITCH
    assert after.loss_scale == {"scale": 512.0, "good_steps": 5}
    rolling = training.progress("second") / f"step-{SWITCH + 2:08d}"
    state = export(rolling, training.folder / "state2")
    training.run("third", "torch", SWITCH + 3, state=state, **shape)
    last = Checkpoint(training.progress("third") / f"step-{SWITCH + 3:08d}").position
    assert last.loss_scale == {"scale": 512.0, "good_steps": 6}


@pytest.mark.parametrize("preset", ["torch", "zero2", "zero3"])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_switch_with_allowed_loss_begins_the_optimizer_anew(training, preset, precision):
    """From weights alone a phase goes on: the first loss is that of the weights, the optimizer
    counts from the start, and the moments' loss is seen in the losses after."""
    whole = training.run("whole", "torch", STEPS, save_every=SWITCH, keep=9)
    rolling = training.progress("whole") / f"step-{SWITCH:08d}"
    found = Checkpoint(rolling)
    with artifact.publish(training.folder / "weights", "state") as draft:
        write_state(draft.folder, found.position, found.shapes, ["master"], found.tensor)
    losses = training.run("second", preset, STEPS, state=training.folder / "weights",
                          mixed_precision=precision, allow=["moments"])  # fmt: skip
    assert losses[0] == pytest.approx(whole[SWITCH], rel=1e-6 if precision == "no" else 5e-3)
    assert deviation(losses, whole[SWITCH:]) > 1e-3
    position = Checkpoint(training.progress("second") / f"step-{STEPS:08d}").position
    assert (position.step, position.optimizer_step) == (STEPS, STEPS - SWITCH)
