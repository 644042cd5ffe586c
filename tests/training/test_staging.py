"""Memory for copies: equal bits, never more than its size."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zerotrain.training.checkpointing.rank_writer import Staging, _open_side_stream


def test_the_writing_thread_stays_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a stream is left, torch goes back to the device before: 0 in a new thread, which has no
    business there. So the device is entered first and left last."""
    events: list[str] = []

    @contextlib.contextmanager
    def entered(what: Any) -> Iterator[None]:
        events.append(f"enter {what}")
        yield
        events.append(f"leave {what}")

    stream = SimpleNamespace(wait_stream=lambda other: events.append(f"wait for {other}"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the steps of {device}")
    monkeypatch.setattr(torch.cuda, "device", entered)
    monkeypatch.setattr(torch.cuda, "stream", lambda one: entered("its stream"))
    tensor: Any = SimpleNamespace(device=torch.device("cuda", 3))
    context = _open_side_stream({"a": tensor})
    assert events == ["wait for the steps of cuda:3"]  # in the thread that trains
    with context:
        events.append("write")
    assert events[1:] == [
        "enter cuda:3", "enter its stream", "write", "leave its stream", "leave cuda:3"
    ]  # fmt: skip


def test_copies_are_equal_and_of_their_own() -> None:
    """Every type and shape, also of odd sizes; what is changed afterwards does not change them."""
    tensors = [
        torch.arange(7.0), torch.randn(3, 5), torch.zeros(0), torch.arange(9, dtype=torch.int64),
        torch.randn(11).to(torch.bfloat16),
    ]  # fmt: skip
    expected = [tensor.clone() for tensor in tensors]
    staging = Staging(sum(-(-tensor.nbytes // 64) * 64 for tensor in tensors))
    copies = [staging.copy(tensor) for tensor in tensors]
    for tensor in tensors:
        tensor.zero_()
    for copy, own in zip(copies, expected, strict=True):
        assert copy is not None
        assert copy.dtype == own.dtype
        assert torch.equal(copy, own)


def test_what_has_no_room_is_not_copied() -> None:
    """And a smaller one after it still is, where it fits."""
    staging = Staging(128)
    assert staging.copy(torch.ones(16)) is not None
    assert staging.copy(torch.ones(32)) is None
    last = staging.copy(torch.ones(16))
    assert last is not None
    assert last.sum() == 16
    assert staging.copy(torch.ones(1)) is None
