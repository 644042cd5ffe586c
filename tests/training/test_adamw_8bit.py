"""AdamW with moments of 8 bits: exact over checkpoints, and portable to AdamW of 32."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tests.training.optimizer_trials import trial_phase

from zerotrain.config import optimizers
from zerotrain.errors import PipelineError
from zerotrain.training.engines import torch_engine
from zerotrain.training.optim.optimizer import ParamGroup, open_optimizers

installed = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)
EIGHT = {"optimizer": "adamw8bit", "optimizer_args": {"min_8bit_size": 64}}
"""Parameters of the tiny model are small."""
STEPS = 8


def test_without_the_package_it_is_refused(monkeypatch):
    """In a sentence, with how to get it and what works without."""
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.delitem(sys.modules, "zerotrain.training.optim.adamw_8bit", raising=False)
    phase = trial_phase("adamw8bit", "torch")
    with pytest.raises(PipelineError, match="adamw8bit needs bitsandbytes") as caught:
        open_optimizers(
            phase, [ParamGroup(["a"], 1e-2, 0.0)], [[torch.nn.Parameter(torch.ones(2))]]
        )
    assert "pip install bitsandbytes" in str(caught.value)
    assert "zero2_offload" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "numel", "expected"),
    [("adamw8bit", 4096, 2 * (4096 + 4 * 16)), ("adamw8bit", 4095, 8 * 4095),
     ("adamw8bit", 4097, 2 * (4097 + 4 * 17)), ("adamw", 4096, 8 * 4096)],
)  # fmt: skip
def test_the_planner_knows_its_bytes(name, numel, expected):
    """A byte for each moment and four for a block of 256; small parameters have float32."""
    assert optimizers.state_bytes(name, {}, numel) == expected


@installed
def test_the_planners_bytes_are_those_of_the_class():
    """After a step, of a large and a small parameter; the count and the maps aside."""
    phase = trial_phase("adamw8bit", "torch")
    parameters = [torch.nn.Parameter(torch.ones(n)) for n in (5000, 100)]
    (made,) = open_optimizers(phase, [ParamGroup(["a", "b"], 1e-2, 0.0)], [parameters])
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    made.step()
    for parameter in parameters:
        held = [v for k, v in made.state[parameter].items() if k not in ("step", "qmap1", "qmap2")]
        expected = optimizers.state_bytes("adamw8bit", {}, parameter.numel())
        assert sum(tensor.nbytes for tensor in held) == expected


class Narrow(torch.optim.SGD):
    """Keeps its slots in a form of its own, as AdamW8bit does."""

    def read_slot(self, parameter: torch.Tensor, slot: str) -> torch.Tensor:
        return torch.zeros_like(parameter)

    def fill(self, parameter: torch.Tensor, updates: int, slots: Mapping[str, Any]) -> None:
        pass


@pytest.mark.parametrize(("kind", "steady"), [(Narrow, False), (torch.optim.SGD, True)])
def test_moments_are_decoded_one_parameter_at_a_time(monkeypatch, kind, steady):
    """A save that ran during the passes would hold the decoded moments of all parameters, four
    times what 8 bits take: each is written before the next one is decoded."""

    def opened(phase: Any, groups: Any, parameters: Any) -> list[torch.optim.Optimizer]:
        return [kind([one for group in parameters for one in group])]

    monkeypatch.setattr(torch_engine, "open_optimizers", opened)
    engine = torch_engine.TorchEngine(torch.nn.Linear(3, 2), trial_phase("adamw8bit", "torch"))
    assert engine.steady is steady


@installed
def test_resume_is_exact(training):
    """Four and four steps end in the bits of eight, weights and moments; and 8 bits are not 32."""
    training.assert_resumes("torch", STEPS // 2, STEPS, **EIGHT)
    training.run("wide", "torch", STEPS)
    assert training.hashes("wide", STEPS) != training.hashes("whole", STEPS)
    found = training.checkpoint("whole", STEPS)
    assert found.slots == ["master", "exp_avg", "exp_avg_sq"]
    assert found.position.optimizer_step == STEPS


@installed
def test_it_trains_as_adamw_does(training):
    """Losses within a hundredth of those of float32 moments, over sixteen steps."""
    narrow, wide = (
        training.run(name, "torch", 16, **changes) for name, changes in (("a", EIGHT), ("b", {}))
    )
    assert max(abs(a / b - 1) for a, b in zip(narrow, wide, strict=True)) < 0.01
    assert narrow != wide


@installed
@pytest.mark.parametrize("first", [EIGHT, {}], ids=["8 to 32", "32 to 8"])
def test_moments_cross_to_and_from_adamw(training, first):
    """The state of one starts the other: after an update its moments are those of a training by
    the first one alone, but for the rounding; without them they would be a tenth of a gradient."""
    second = {} if first else EIGHT
    training.run("reference", "torch", STEPS, save_every=1, keep=STEPS, **first)
    state = training.export_state("reference", STEPS // 2)
    training.run("other", "torch", STEPS, state=state, save_every=1, keep=STEPS, **second)
    other, reference = (
        training.checkpoint(name, STEPS // 2 + 1) for name in ("other", "reference")
    )
    assert other.position.optimizer_step == STEPS // 2 + 1
    for slot in ("exp_avg", "exp_avg_sq"):
        found, expected = (
            torch.cat([one.tensor(name, slot).flatten() for name in reference.names])
            for one in (other, reference)
        )
        assert (found - expected).norm() < 0.05 * expected.norm()
    (group, *_) = other.position.param_groups
    assert group["betas"] == [0.9, 0.99]
