"""The loop's own decisions, with an engine that only answers."""

from __future__ import annotations

import contextlib
import math
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from tests.builders.phases import make_tiny_phase

from zerotrain.errors import PipelineError
from zerotrain.state.position import StepCounter
from zerotrain.training import loop
from zerotrain.training.checks import nan_gradients_if_not_finite
from zerotrain.training.reporting import log as reporting


class Engine:
    """Answers every step with one norm."""

    rank = 0
    world_size = 1
    device = torch.device("cpu")
    model = torch.nn.Module()
    shapes: ClassVar[dict[str, list[int]]] = {}

    def __init__(self, norm: float, scale: float | None) -> None:
        self.norm = norm
        self.scale = scale

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def loss_scale(self) -> dict[str, float] | None:
        return None if self.scale is None else {"scale": self.scale, "hysteresis": 1}

    def backward(self, loss: torch.Tensor) -> None:
        pass

    def step(self, learning_rate: float, beta1: float | None = None) -> float:
        return self.norm


class Saving(contextlib.nullcontext):
    """Notes the steps that it is asked to save."""

    def __init__(self) -> None:
        super().__init__()
        self.saved: list[int] = []

    def is_due(self, step: int) -> bool:
        return True

    def is_overdue(self) -> bool:
        return False

    def is_writing(self) -> bool:
        return False

    def wait_or_stage_tensors(self, writing: bool) -> None:
        pass

    def finish(self) -> None:
        pass

    def begin(self, counter: StepCounter, *, wait: bool = False) -> None:
        self.saved.append(counter.step)


class Log(reporting.NoLog):
    """Notes what is reported."""

    def __init__(self, said: list[str]) -> None:
        self.say = said.append  # type: ignore[method-assign]


def run(
    *,
    loss: float = 0.5,
    norm: float = 1.0,
    scale: float | None = None,
    nan_action: str = "stop",
    steps: int = 3,
    said: list[str] | None = None,
) -> list[int]:
    """Train three steps, saving each; the steps that were saved."""
    saving = Saving()
    phase = make_tiny_phase("a", "torch", steps).with_values(
        save_every=1, global_batch_size=2, micro_batch_size=2, learning_rate=1.0, seed=0,
        lr_scheduler="constant", lr_warmup_steps=0, nan_action=nan_action,
    )  # fmt: skip
    objective = SimpleNamespace(loss=lambda *args, **kwargs: torch.full((2,), loss))
    batches = SimpleNamespace(
        batch=lambda *args: {}, prepare=lambda *args: None, name=lambda number: f"{number}.png"
    )
    log = Log([] if said is None else said)
    counter = StepCounter(0, 0, steps)
    loop.train(Engine(norm, scale), objective, batches, phase, counter, log, saving, lambda: False)
    return saving.saved


def test_every_save_is_reached():
    """With finite numbers each of the three steps is saved."""
    assert run() == [1, 2, 3]


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_spoilt_weights_are_never_saved(value):
    """Whether a gradient is no finite number, although the loss was finite, or the loss."""
    with pytest.raises(PipelineError, match="gradients' norm of step 1 is"):
        assert not run(norm=value)
    with pytest.raises(PipelineError, match="loss of step 1 is"):
        assert not run(loss=value)


def test_fp16_continues_after_an_overflow():
    """At the lowest scale there is nothing left to lower."""
    assert run(norm=math.inf, scale=512.0) == [1, 2, 3]
    assert run(norm=math.inf, scale=512.0, steps=30) == list(range(1, 31))
    with pytest.raises(PipelineError, match="gradients' norm of step 1 is inf"):
        run(norm=math.inf, scale=1.0)


def test_nan_action_skip_continues_and_names_the_samples():
    """Whether the loss or a gradient is no finite number."""
    for spoilt in ({"loss": math.nan}, {"norm": math.inf}):
        said: list[str] = []
        assert run(**spoilt, nan_action="skip", said=said) == [1, 2, 3]
        assert len(said) == 3
        assert "of step 2 is" in said[1]
        assert "2.png, 3.png" in said[1]
        assert said[1].endswith("this update is left out (nan_action: skip)")


def test_nan_action_skip_does_not_continue_for_ever():
    """Ten updates left out one after the other are borne, an eleventh is not."""
    assert len(run(loss=math.nan, nan_action="skip", steps=10)) == 10
    with pytest.raises(PipelineError, match=r"loss of step 11 is nan.*the 10 updates before it"):
        run(loss=math.nan, nan_action="skip", steps=11)


def test_a_poisoned_loss_is_the_loss():
    """Bit for bit where it is finite, with its gradients; else every gradient is NaN, also where
    the loss's own would be finite."""
    weights = torch.randn(50, generator=torch.Generator().manual_seed(1), requires_grad=True)
    loss = (weights**3).mean()
    (own,) = torch.autograd.grad(loss, weights, retain_graph=True)
    (found,) = torch.autograd.grad(nan_gradients_if_not_finite(loss), weights)
    assert torch.equal(nan_gradients_if_not_finite(loss), loss)
    assert torch.equal(found, own)
    infinite = weights.sum() + math.inf
    (own,) = torch.autograd.grad(infinite, weights, retain_graph=True)
    (found,) = torch.autograd.grad(nan_gradients_if_not_finite(infinite), weights)
    assert torch.isfinite(own).all()
    assert torch.isnan(found).all()
