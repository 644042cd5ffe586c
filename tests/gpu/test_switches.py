"""Switches between all presets on one GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.builders.states import changed, drop_moments
from tests.gpu.conftest import GpuTraining, Wholes
from tests.training.matrix import PRESETS, ROUNDED, deviation

from zerotrain.state.state import State

pytestmark = pytest.mark.gpu

SWITCH, STEPS = 4, 8
VALUES: dict[str, Any] = {
    "gradient_accumulation_steps": 2, "save_every": SWITCH, "keep": 10, "lr_scheduler_steps": 12,
    "param_groups": [
        {"parameters": [r"\.bias$", "norm"], "learning_rate": 5e-4, "adam_weight_decay": 0.0}
    ],
    "frozen_parameters": [r"^time_embedding\.linear_1"],
}  # fmt: skip
BOUND = {"no": 1e-5, "bf16": ROUNDED["bf16"]}
"""fp32 on the CPU holds 1e-6; a GPU's kernels depend on where a weight begins in memory, which
flattening changes."""
PAIRS = [
    *((a, b, "no") for a in PRESETS for b in PRESETS),
    *((a, b, "bf16") for a, b in zip(PRESETS, [*PRESETS[1:], PRESETS[0]], strict=True)),
    ("torch", "zero3_offload", "bf16"), ("zero2_offload", "torch", "bf16"),
]  # fmt: skip


def name_of(preset: str, precision: str) -> str:
    """Of the uninterrupted run."""
    return f"switch-{preset}-{precision}"


@pytest.mark.parametrize(("first", "second", "precision"), PAIRS)
def test_switch_keeps_the_losses(
    wholes: Wholes, training: GpuTraining, first: str, second: str, precision: str
) -> None:
    """The losses before it to the bit, those after it within the bound of the pair; a preset to
    itself to the bit."""
    values = {**VALUES, "mixed_precision": precision}
    whole = wholes.losses(name_of(first, precision), first, STEPS, **values)
    state = wholes.state(name_of(first, precision), SWITCH)
    training.environment = wholes.training.environment
    losses = training.run("second", second, STEPS, state=state, **values)
    assert losses[:SWITCH] == whole[:SWITCH]
    apart = deviation(losses, whole)
    print(f"{first}->{second} {precision}: {apart:.1e}, bound {BOUND[precision]:.0e}")
    assert apart <= (0 if first == second else BOUND[precision])
    # Step, sampler and count of updates go with it.
    position = training.checkpoint("second", STEPS).position
    assert position.step == position.optimizer_step == STEPS
    assert position.samples == 4 * STEPS


@pytest.mark.parametrize("preset", PRESETS)
def test_state_crosses_to_each_engine_and_back_to_the_bit(
    wholes: Wholes, training: GpuTraining, preset: str
) -> None:
    """A state that another engine takes over and writes again, after a step that moves no weight,
    has the same weights: each tensor's bytes."""
    values = {**VALUES, "mixed_precision": "no"}
    wholes.losses(name_of("torch", "no"), "torch", STEPS, **values)
    state = wholes.state(name_of("torch", "no"), SWITCH)
    # The rate is so small that a step moves no weight of float32, and moments are compared by rule.
    still = {**values, "learning_rate": 1e-30, "lr_scheduler": "constant", "lr_warmup_steps": 0,
             "adam_weight_decay": 0.0, "adam_beta1": 0.9,
             "param_groups": [{**VALUES["param_groups"][0], "learning_rate": 1e-30}]}  # fmt: skip
    training.environment = wholes.training.environment
    training.run("other", preset, SWITCH + 1, state=state, **still)
    before, after = State(state), training.checkpoint("other", SWITCH + 1)
    assert set(after.names) == set(before.names)
    for name in before.names:
        assert torch.equal(after.tensor(name, "master"), before.tensor(name, "master")), name


def test_torch_to_offload_and_back_ends_as_close_as_one(
    wholes: Wholes, training: GpuTraining
) -> None:
    """Three phases: out of the GPU's memory and back."""
    values = {**VALUES, "mixed_precision": "no", "lr_scheduler_steps": 12}
    training.environment = wholes.training.environment
    whole = training.run("whole", "torch", 12, **values)
    training.run("a", "torch", 4, **values)
    state = training.export_state("a", 4)
    training.run("b", "zero2_offload", 8, state=state, **values)
    state = training.export_state("b", 8)
    losses = training.run("c", "torch", 12, state=state, **values)
    apart = deviation(losses, whole)
    print(f"torch->zero2_offload->torch: {apart:.1e}")
    assert apart <= BOUND["no"]


def test_a_switch_without_moments_would_be_noticed(wholes: Wholes, training: GpuTraining) -> None:
    """The bound is far below what a switch to the same preset does that drops the moments."""
    values = {**VALUES, "mixed_precision": "no"}
    whole = wholes.losses(name_of("torch", "no"), "torch", STEPS, **values)
    state = wholes.state(name_of("torch", "no"), SWITCH)
    training.environment = wholes.training.environment
    forgetful = changed(state, training.folder / "without-moments", drop_moments)
    losses = training.run("second", "torch", STEPS, state=forgetful, **values)
    apart = deviation(losses, whole)
    print(f"without moments: {apart:.1e}")
    assert apart > 1e-3 > 10 * BOUND["no"]
