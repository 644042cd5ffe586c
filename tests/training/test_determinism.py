"""Equal bits on a GPU: which flags are set, and what is reported of an operation that has no such
form.

A machine without a GPU is made to believe that it has one; what the flags do is torch's.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from zerotrain.config.launch import LaunchConfig
from zerotrain.errors import PipelineError
from zerotrain.training.engines import kernels

PHASE = SimpleNamespace(phase="a", launch=LaunchConfig())


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU, for those who ask for one; the flags are put back afterwards."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    monkeypatch.delenv(kernels.WORKSPACE, raising=False)
    yield
    torch.use_deterministic_algorithms(False)


def test_a_gpu_computes_equal_bits(gpu):
    """Within, torch refuses what could differ, and cuBLAS and cuDNN choose by no race."""
    with kernels.use_deterministic_kernels(PHASE):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.backends.cudnn.deterministic
        assert os.environ[kernels.WORKSPACE] == ":4096:8"


def test_a_phase_may_give_equal_bits_up(gpu):
    """A user whose model cannot may say so."""
    with kernels.use_deterministic_kernels(
        SimpleNamespace(phase="a", launch=LaunchConfig(full_determinism=False))
    ):
        assert not torch.are_deterministic_algorithms_enabled()
        assert not torch.backends.cudnn.deterministic


def test_a_cpu_is_left_alone():
    """Its numbers have always been equal; torch's other kernels would change them."""
    with kernels.use_deterministic_kernels(PHASE):
        assert not torch.are_deterministic_algorithms_enabled()


def test_an_operation_without_such_a_form_is_named(gpu):
    """torch's error becomes a sentence that names the operation and the way out; others pass."""
    with (
        pytest.raises(PipelineError, match="phase a: put_ has no form on this GPU") as caught,
        kernels.use_deterministic_kernels(PHASE),
    ):
        raise RuntimeError(f"put_ {kernels.LACKING}, but you set")
    assert "full_determinism: false" in caught.value.hint
    with (
        pytest.raises(RuntimeError, match="shapes"),
        kernels.use_deterministic_kernels(PHASE),
    ):
        raise RuntimeError("shapes differ")
