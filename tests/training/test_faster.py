"""torch.compile and TF32: what they may change, and what not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tests.training.matrix import deviation
from tests.training.optimizer_trials import Model, batch

from zerotrain.checkpoint import Checkpoint
from zerotrain.training import faster

STEPS = 6
slow = pytest.mark.slow


@pytest.mark.parametrize(
    "preset", ["torch", *(pytest.param(p, marks=slow) for p in ("zero2", "zero3"))]
)
def test_compiled_names_and_numbers_are_the_models(training, preset):
    """dynamo alone traces the same operators: the losses stay, and a checkpoint has the names of
    the model that was not compiled, from which it goes on."""
    plain = training.run("plain", preset, STEPS)
    compiled = training.run("compiled", preset, STEPS, dynamo_backend="eager")
    assert deviation(compiled, plain) <= 1e-6
    first, second = (
        Checkpoint(training.progress(n) / f"step-{STEPS:08d}") for n in ("plain", "compiled")
    )
    assert second.shapes == first.shapes
    training.run("compiled", preset, STEPS + 1)
    assert len(training.losses("compiled")) == STEPS + 1


def steps(model: torch.nn.Module, first: int, last: int) -> list[float]:
    """Train some steps, each with a batch of its own; the losses."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(first, last):
        inputs, targets = batch(step)
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@slow
def test_inductor_is_within_a_bound_and_resumes_exactly():
    """Its kernels round otherwise: losses within 1e-5 of those without, of a small model in
    float32. Another compilation, in the middle, gives the bits of one."""
    phase = SimpleNamespace(dynamo_backend="inductor", dynamo_mode="default", max_length=None)
    plain, whole, half, rest = Model(), Model(), Model(), Model()
    for model in (whole, half, rest):
        faster.compile_model(model, phase)
    losses = steps(whole, 0, STEPS)
    assert deviation(losses, steps(plain, 0, STEPS)) <= 1e-5
    first = steps(half, 0, STEPS // 2)
    rest.load_state_dict(half.state_dict())
    torch.compiler.reset()
    assert first + steps(rest, STEPS // 2, STEPS) == losses
    assert all(
        torch.equal(a, b) for a, b in zip(rest.parameters(), whole.parameters(), strict=True)
    )


@pytest.mark.parametrize(("text", "dynamic"), [(None, False), (512, True)])
def test_shapes_of_the_steps_before_decide_nothing(text, dynamic):
    """Left to itself torch compiles for one shape first, and for all when a second one comes: the
    numbers would depend on where a training was resumed."""
    asked = []
    model = SimpleNamespace(compile=lambda **how: asked.append(how))
    phase = SimpleNamespace(dynamo_backend="inductor", dynamo_mode="max-autotune", max_length=text)
    faster.compile_model(model, phase)
    assert asked == [{"backend": "inductor", "dynamic": dynamic, "mode": "max-autotune"}]
    phase = SimpleNamespace(dynamo_backend="no", dynamo_mode="default", max_length=text)
    faster.compile_model(model, phase)
    assert len(asked) == 1


@pytest.fixture
def _tf32_on():
    torch.backends.cuda.matmul.allow_tf32 = True
    yield
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.usefixtures("_tf32_on")
def test_tf32_is_what_the_phase_says_and_said_where_it_is_in_vain(monkeypatch):
    """Off by default, also where something else has turned it on."""
    asked = SimpleNamespace(phase="a", allow_tf32=True)
    cpu = torch.device("cpu")
    assert faster.allow_tf32(SimpleNamespace(phase="a", allow_tf32=False), cpu) == ""
    assert not torch.backends.cuda.matmul.allow_tf32
    assert "allow_tf32 has no effect on cpu" in faster.allow_tf32(asked, cpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "T4")
    assert "no effect on T4" in faster.allow_tf32(asked, torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert faster.allow_tf32(asked, torch.device("cuda", 0)) == ""
    assert torch.backends.cuda.matmul.allow_tf32
