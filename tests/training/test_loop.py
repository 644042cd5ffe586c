"""The loop's own decisions, with an engine that only answers."""

from __future__ import annotations

import contextlib
import math
from types import SimpleNamespace

import pytest
import torch

from zerotrain.errors import PipelineError
from zerotrain.launch.resolved import FP16
from zerotrain.training import loop
from zerotrain.training.log import NoLog


class Engine:
    """Answers every step with one norm."""

    rank = 0
    world_size = 1
    device = torch.device("cpu")
    model = None

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


def run(
    monkeypatch: pytest.MonkeyPatch,
    *,
    loss: float = 0.5,
    norm: float = 1.0,
    scale: float | None = None,
) -> list[int]:
    """Train three steps, saving each; the steps that were saved."""
    saved: list[int] = []
    monkeypatch.setattr(loop, "save", lambda engine, phase, clock, *rest: saved.append(clock.step))
    phase = SimpleNamespace(
        phase="a", until_step=3, save_every=1, global_batch_size=2, micro_batch_size=2, seed=0,
        gradient_accumulation_steps=1, learning_rate=1.0, lr_scheduler="constant",
        warmup_steps=lambda horizon: 0, fp16=FP16,
    )  # fmt: skip
    objective = SimpleNamespace(loss=lambda *args, **kwargs: torch.full((2,), loss))
    batches = SimpleNamespace(batch=lambda *args: None)
    log = NoLog()
    clock = loop.Clock(0, 0, 3)
    loop.train(Engine(norm, scale), objective, batches, phase, clock, log, None, lambda: False)
    return saved


def test_every_save_is_reached(monkeypatch):
    """With finite numbers each of the three steps is saved."""
    assert run(monkeypatch) == [1, 2, 3]


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_spoilt_weights_are_never_saved(monkeypatch, value):
    """A gradient that is no finite number stops the training before the checkpoint, although the
    loss was finite; so does the loss."""
    with pytest.raises(PipelineError, match="gradients' norm of step 1 is"):
        assert not run(monkeypatch, norm=value)
    with pytest.raises(PipelineError, match="loss of step 1 is"):
        assert not run(monkeypatch, loss=value)


def test_fp16_goes_on_after_an_overflow(monkeypatch):
    """An update left out lowers the scale and counts as a step; at the lowest scale there is
    nothing left to lower."""
    assert run(monkeypatch, norm=math.inf, scale=512.0) == [1, 2, 3]
    with pytest.raises(PipelineError, match="gradients' norm of step 1 is inf"):
        run(monkeypatch, norm=math.inf, scale=1.0)
