"""torch.compile and TF32: what they may change, and what not."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.training.conftest import Training
from tests.training.matrix import deviation
from tests.training.optimizer_trials import Model, batch
from torch._dynamo import config as dynamo
from torch._inductor import config as inductor
from torch._inductor.utils import fresh_cache

from zerotrain.config.launch import LaunchConfig
from zerotrain.training.checkpointing import progress_folder
from zerotrain.training.engines import kernels

STEPS = 6
slow = pytest.mark.slow


@slow
def test_compiled_names_and_numbers_are_the_models(training):
    """dynamo alone traces the same operators; a checkpoint has the names of the plain model."""
    plain = training.run("plain", "torch", STEPS)
    compiled = training.run("compiled", "torch", STEPS, dynamo_backend="eager")
    assert deviation(compiled, plain) <= 1e-6
    first, second = (training.checkpoint(n, STEPS) for n in ("plain", "compiled"))
    assert second.shapes == first.shapes
    training.run("compiled", "torch", STEPS + 1)
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


def compiled(**changes: Any) -> SimpleNamespace:
    """What compile_model reads of a phase."""
    length = changes.pop("max_length", None)
    launch = LaunchConfig.model_construct(**{"dynamo_backend": "inductor", **changes})
    return SimpleNamespace(launch=launch, train=SimpleNamespace(max_length=length))


def start(training: Training, name: str, cache: Path) -> subprocess.Popen[bytes]:
    """A phase's process with a folder of its own for what inductor makes, which takes minutes."""
    saved = progress_folder.newest_intact(training.progress(name), STEPS)
    return subprocess.Popen(
        [sys.executable, "-m", "zerotrain.training.rank", *training.words(name, resume=saved)],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "PYTHONPATH": "workflow"},
    )  # fmt: skip


@pytest.mark.soak
def test_a_compiled_training_resumes_in_equal_bits(training, tmp_path):
    """inductor's kernels for a real U-Net, made again by the process that resumes."""
    changes = {"dynamo_backend": "inductor", "save_every": 1, "keep": STEPS}
    for name in ("whole", "cut"):
        training.phase(name, "torch", STEPS, **changes)
    assert start(training, "whole", tmp_path / "first").wait() == 0
    child = start(training, "cut", tmp_path / "second")
    while not (training.rolling("cut", 2) / "manifest.json").exists():
        assert child.poll() is None
        time.sleep(0.01)
    child.kill()
    child.wait()
    assert start(training, "cut", tmp_path / "third").wait() == 0
    assert training.losses("cut") == training.losses("whole")
    assert training.hashes("cut", STEPS) == training.hashes("whole", STEPS)


@pytest.fixture
def _settings_kept():
    names = ("deterministic",), ("recompile_limit", "accumulated_recompile_limit")
    both = (inductor, names[0]), (dynamo, names[1])
    former = [(config, name, getattr(config, name)) for config, own in both for name in own]
    yield
    for config, name, value in former:
        setattr(config, name, value)


@pytest.mark.usefixtures("_settings_kept")
def test_no_kernel_is_chosen_by_its_time():
    """inductor measures none whose choice shows in the numbers, and never gives up compiling after
    so many shapes, which a resume would count again. Where full_determinism is off, it may."""
    model = SimpleNamespace(compile=lambda **how: None, modules=list)
    kernels.compile_model(model, compiled(full_determinism=False))
    assert inductor.deterministic is False
    kernels.compile_model(model, compiled(dynamo_backend="eager"))
    assert dynamo.recompile_limit == dynamo.accumulated_recompile_limit > 10**6
    kernels.compile_model(model, compiled())
    assert inductor.deterministic is True


class Squares(torch.nn.Module):
    """One operator."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * inputs


@pytest.mark.usefixtures("_settings_kept")
def test_the_tenth_shape_is_compiled_as_the_first():
    """Left to itself dynamo would run it uncompiled."""
    model, made = Squares(), []

    def backend(graph, inputs):
        made.append(graph)
        return graph

    kernels.compile_model(model, compiled(dynamo_backend=backend))
    for rows in range(2, 14):
        model(torch.randn(rows, 3))
    assert len(made) == 12


@slow
@pytest.mark.usefixtures("_settings_kept")
def test_inductor_is_within_a_bound_and_resumes_exactly():
    """Its kernels round otherwise: losses within 1e-5 of those without, of a small model in
    float32. Another compilation, in the middle, gives the bits of one."""
    phase = compiled()
    plain, whole, half, rest = Model(), Model(), Model(), Model()
    for model in (whole, half, rest):
        kernels.compile_model(model, phase)
    losses = steps(whole, 0, STEPS)
    assert deviation(losses, steps(plain, 0, STEPS)) <= 1e-5
    first = steps(half, 0, STEPS // 2)
    rest.load_state_dict(half.state_dict())
    torch.compiler.reset()
    with fresh_cache():  # as on another machine, which makes its kernels itself
        assert first + steps(rest, STEPS // 2, STEPS) == losses
    assert all(
        torch.equal(a, b) for a, b in zip(rest.parameters(), whole.parameters(), strict=True)
    )


@pytest.mark.usefixtures("_settings_kept")
@pytest.mark.parametrize(("text", "dynamic"), [(None, False), (512, True)])
def test_shapes_of_the_steps_before_decide_nothing(text, dynamic):
    """Left to itself torch compiles for one shape first, and for all when a second one comes: the
    numbers would depend on where a training was resumed."""
    asked = []
    model = SimpleNamespace(compile=lambda **how: asked.append(how), modules=list)
    phase = compiled(dynamo_mode="max-autotune", max_length=text)
    kernels.compile_model(model, phase)
    assert asked == [{"backend": "inductor", "dynamic": dynamic, "mode": "max-autotune"}]
    phase = compiled(dynamo_backend="no", max_length=text)
    kernels.compile_model(model, phase)
    assert len(asked) == 1


@pytest.fixture
def _tf32_on():
    torch.backends.cuda.matmul.allow_tf32 = True
    yield
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.usefixtures("_tf32_on")
def test_tf32_is_what_the_phase_says_and_reported_where_it_is_in_vain(monkeypatch):
    """Off by default, also where something else has turned it on."""
    asked = SimpleNamespace(phase="a", launch=LaunchConfig(allow_tf32=True))
    cpu = torch.device("cpu")
    assert kernels.allow_tf32(SimpleNamespace(phase="a", launch=LaunchConfig()), cpu) == ""
    assert not torch.backends.cuda.matmul.allow_tf32
    assert "allow_tf32 has no effect on cpu" in kernels.allow_tf32(asked, cpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "T4")
    assert "no effect on T4" in kernels.allow_tf32(asked, torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert kernels.allow_tf32(asked, torch.device("cuda", 0)) == ""
    assert torch.backends.cuda.matmul.allow_tf32
