"""The switch: a phase that continues from a state continues as if nothing had happened."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.builders.states import changed, drop_moments
from tests.training.conftest import Training
from tests.training.matrix import (
    EXACT,
    PRESETS,
    ROUNDED,
    Matrix,
    Setup,
    Switch,
    chosen,
    covering,
    deviation,
    fp32_pairs,
    ring,
)

from zerotrain import artifact
from zerotrain.config.relaunch import share_batch
from zerotrain.state.state import State, write_state
from zerotrain.training.checkpointing import progress_folder

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
    quick, in_ci = [ring()[0], ring()[2]], [*ring(), *chosen()]

    def marks(switch: Switch) -> Any:
        if switch in quick:
            return ()
        return pytest.mark.slow if switch in in_ci else pytest.mark.soak

    everything = [*fp32_pairs(), *covering()]
    return [pytest.param(switch, id=str(switch), marks=marks(switch)) for switch in everything]


@pytest.mark.parametrize("switch", _cases())
def test_switch_matrix_keeps_the_losses(matrix, switch):
    """10 steps, a switch, 10 steps: the losses are those of a run without a switch, within the
    bound of the pair; bit by bit where neither rounding nor the order of sums differs."""
    apart = matrix.deviation(switch)
    print(f"{switch}: largest relative deviation {apart:.1e}, bound {switch.bound:.0e}")
    assert apart <= switch.bound


@pytest.mark.slow
@pytest.mark.parametrize(
    "precision", ["no", *(pytest.param(p, marks=pytest.mark.soak) for p in ("bf16", "fp16"))]
)
def test_switch_without_moments_would_be_noticed(matrix, precision):
    """Weights alone are not enough: a switch that the bound of its pair lets pass is far beyond it
    once the moments are dropped; in fp32 beyond 1e-3, too."""
    first, second = (Setup(preset, precision=precision) for preset in ("zero2", "zero2_offload"))
    switch = Switch(first, second)
    name = f"{switch} without moments"
    forgetful = changed(matrix.state(first), matrix.training.folder / name / "state", drop_moments)
    apart = matrix.apart(switch, name, forgetful)
    print(f"{name}: largest relative deviation {apart:.1e}, bound {switch.bound:.0e}")
    assert matrix.deviation(switch) <= switch.bound < apart
    assert apart > 1e-3


@pytest.mark.slow
def test_switch_carries_the_position(training):
    """Step, sampler, schedule and optimizer count cross the switch; the log continues."""
    training.run("first", "torch", SWITCH)
    state = training.export_state("first", SWITCH)
    training.run("second", "zero2_offload", STEPS, state=state, global_batch_size=6,
                 lr_scheduler_steps=40)  # fmt: skip
    position = training.checkpoint("second", STEPS).position
    assert position.step == position.optimizer_step == STEPS
    assert position.samples == SWITCH * 4 + (STEPS - SWITCH) * 6
    assert position.lr_scheduler_steps == 16
    assert position.engine["zero_stage"] == 2
    assert [line["step"] for line in training.log("second")] == list(range(1, STEPS + 1))
    assert {line["phase"] for line in training.log("second")} == {"first", "second"}


@pytest.mark.parametrize(
    "preset",
    [pytest.param(one, marks=[pytest.mark.slow] * (one != "zero2_offload")) for one in PRESETS],
)
def test_switch_state_is_the_same_from_every_engine(matrix, preset):
    """Each engine's fragments give the model's own parameters, without the frozen and the second
    of the tied ones: their names and shapes, and the weights and moments that plain PyTorch has."""
    state, torchs = State(matrix.state(Setup(preset))), State(matrix.state(Setup("torch")))
    if preset in EXACT:
        assert matrix.whole(Setup(preset)) == matrix.whole(Setup("torch"))
    one, other = (replace(s.position, phase="", engine={}, ran_on={}) for s in (state, torchs))
    assert one == other
    unet = load_file(matrix.training.base / "unet" / "diffusion_pytorch_model.safetensors")
    left_out = ("time_embedding.linear_1.", "mid_block.resnets.1.conv1.weight")
    trained = [name for name in unet if not name.startswith(left_out)]
    assert len(trained) == len(unet) - 3
    assert state.names == torchs.names
    assert set(state.names) == set(trained)
    assert state.shapes == {name: list(unet[name].shape) for name in trained}
    assert set(state.slots) == {"master", "exp_avg", "exp_avg_sq"}
    for name in trained:
        assert not torch.equal(state.tensor(name, "master"), unet[name])
        for slot in state.slots:
            found, expected = state.tensor(name, slot), torchs.tensor(name, slot)
            assert expected.abs().max() > 0
            bound = 0 if preset in EXACT else 1e-4 * expected.abs().max()
            assert (found - expected).abs().max() <= bound, (name, slot)


@pytest.mark.slow
def test_switch_chain_of_five_ends_as_close_as_one(training):
    """4 steps each; errors do not add up."""
    chain = ["torch", "zero1", "zero3_offload", "zero2", "zero2_offload", "torch"]
    shape = {"lr_scheduler_steps": 4 * len(chain)}
    whole = training.run("whole", "torch", 4 * len(chain), **shape)
    state, losses = None, []
    for number, preset in enumerate(chain, start=1):
        name = f"part{number}"
        losses = training.run(name, preset, 4 * number, state=state, **shape)
        state = training.export_state(name, 4 * number)
    apart = deviation(losses, whole)
    print(f"five switches: largest relative deviation {apart:.1e}")
    assert apart <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "precision", "bound"), [(1, "no", 1e-5), (1, "bf16", ROUNDED["bf16"])]
)
def test_a_switch_to_fewer_processes_keeps_the_micro_batch(training, processes, precision, bound):
    """Two ranks of one sample each become one that accumulates."""
    shape = {"global_batch_size": 4, "num_processes": 2, "save_every": SWITCH, "keep": 9}
    whole = training.run("whole", "zero2", STEPS, gradient_accumulation_steps=2, **shape)
    state = training.export_state("whole", SWITCH)
    shape["num_processes"] = processes
    shape["gradient_accumulation_steps"] = share_batch(4, processes, 1)
    losses = training.run("fewer", "zero2", STEPS, state=state, mixed_precision=precision, **shape)
    position = training.checkpoint("fewer", STEPS).position
    assert (position.samples, position.optimizer_step) == (4 * STEPS, STEPS)
    assert position.engine["gradient_accumulation_steps"] == 4
    assert losses[:SWITCH] == whole[:SWITCH]
    apart = deviation(losses, whole)
    print(f"2 processes to {processes}, {precision}: largest relative deviation {apart:.1e}")
    assert apart <= bound


@pytest.mark.slow
def test_switch_of_a_killed_phase_repeats_nothing_that_was_saved(training):
    """Killed at 40 of 160 steps and switched, it ends as the uninterrupted one."""
    shape = {"save_every": 20, "lr_scheduler_steps": 160, "keep": 20}
    whole = training.run("whole", "torch", 160, **shape)
    training.phase("cut", "torch", 160, **shape)
    process = training.start("cut")
    training.wait_for_step("cut", 40)
    process.kill()
    process.join()
    step = progress_folder.newest_step(training.progress("cut"), 160)
    assert 20 <= step < 160  # the log may be ahead of a save, and the kill behind the log
    state = training.export_state("cut", step)
    losses = training.run("continued", "zero2_offload", 160, state=state, **shape)
    lines = training.log("continued")
    assert [line["step"] for line in lines] == list(range(1, 161))
    assert [line["phase"] for line in lines] == ["cut"] * step + ["continued"] * (160 - step)
    assert losses[:step] == whole[:step]
    apart = deviation(losses, whole)
    print(f"killed at {step} of 160 and switched: largest relative deviation {apart:.1e}")
    assert apart <= 1e-6


@pytest.mark.slow
def test_switch_between_fp16_engines_keeps_the_loss_scale(training):
    """A scale that an overflow has lowered crosses the switch, with the steps since then."""
    shape = {"mixed_precision": "fp16"}
    training.run("first", "torch", SWITCH, **shape)
    before = training.checkpoint("first", SWITCH).position
    state = training.export_state("first", SWITCH)

    def lower(folder: Path) -> None:
        document = json.loads((folder / "state.json").read_text())
        document["loss_scale"] = {"scale": 512.0, "good_steps": 3, "hysteresis": 1}
        artifact.write_json(folder / "state.json", document)

    lowered = changed(state, training.folder / "lowered", lower)
    training.run("second", "zero2", SWITCH + 2, state=lowered, **shape)
    after = training.checkpoint("second", SWITCH + 2).position
    assert before.loss_scale["good_steps"] == SWITCH
    assert after.loss_scale == {"scale": 512.0, "good_steps": 5, "hysteresis": 1}
    state = training.export_state("second", SWITCH + 2)
    training.run("third", "torch", SWITCH + 3, state=state, **shape)
    last = training.checkpoint("third", SWITCH + 3).position
    assert last.loss_scale == {"scale": 512.0, "good_steps": 6, "hysteresis": 1}


@pytest.fixture(scope="module")
def without_moments(tmp_path_factory, inputs, server) -> tuple[list[float], Path]:
    """The losses of an uninterrupted run, and a state of its middle that has weights alone."""
    alone = Training(tmp_path_factory.mktemp("without_moments"), inputs, server)
    whole = alone.run("whole", "torch", STEPS, save_every=SWITCH, keep=9)
    found = alone.checkpoint("whole", SWITCH)
    with artifact.publish(alone.folder / "weights", "state") as draft:
        write_state(draft.folder, found.position, found.shapes, ["master"], found.tensor)
    return whole, alone.folder / "weights"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "preset"),
    [
        *(("no", "torch"), ("no", "zero3"), ("bf16", "zero2")),
        *(
            pytest.param(*case, marks=pytest.mark.soak)
            for case in (("no", "zero2"), ("bf16", "torch"), ("bf16", "zero3"))
        ),
    ],
)
def test_switch_with_allowed_loss_resets_the_optimizer(
    training, without_moments, preset, precision
):
    """The first loss is that of the weights, the moments' loss is seen in those after."""
    whole, state = without_moments
    losses = training.run("second", preset, STEPS, state=state,
                          mixed_precision=precision, allow=["moments"])  # fmt: skip
    rounding = ROUNDED.get(precision, 1e-6)
    assert losses[0] == pytest.approx(whole[SWITCH], rel=rounding)
    assert deviation(losses, whole[SWITCH:]) > max(1e-3, rounding)
    position = training.checkpoint("second", STEPS).position
    assert (position.step, position.optimizer_step) == (STEPS, STEPS - SWITCH)
