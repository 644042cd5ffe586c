"""DDP's buckets: one cut, from the first step of every start, whatever it is asked to look for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from zerotrain.machine.ports import free_port
from zerotrain.training.engines.torch_engine import fix_buckets


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One process that is a group; what the fix leaves in the environment goes with the test."""
    port = free_port()
    monkeypatch.setenv("DDP_SET_LAST_BUCKET_CAP", "0")
    address = f"tcp://127.0.0.1:{port}"
    distributed.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def buckets(steps: int, *, unused: bool) -> list[list[list[int]]]:
    """Of each step the buckets in the order in which they are sent: their parameters' sizes."""
    layers = [torch.nn.Linear(100 * i, 100 * i + 100, bias=False) for i in range(1, 20)]
    model = DistributedDataParallel(
        torch.nn.Sequential(*layers), find_unused_parameters=unused, bucket_cap_mb=5
    )
    fix_buckets(model)
    sent: list[list[int]] = []

    def note(state: Any, bucket: Any) -> Any:
        sent.append([parameter.numel() for parameter in bucket.parameters()])
        done = distributed.all_reduce(bucket.buffer(), async_op=True).get_future()
        return done.then(lambda future: future.value()[0])

    note.__annotations__.clear()  # DDP takes no text for a type
    model.register_comm_hook(None, note)
    found = []
    for _ in range(steps):
        sent.clear()
        model(torch.ones(1, 100)).sum().backward()
        found.append(list(sent))
    return found


def test_buckets_are_those_of_the_first_step(group) -> None:
    """Torch's own would be cut again after it. What backward has first is sent first."""
    first, *later = buckets(3, unused=False)
    assert later == [first, first]
    assert len(first) > 5
    assert first[0] == [1900 * 2000]
    assert os.environ["DDP_SET_LAST_BUCKET_CAP"] == "1"


def test_find_unused_parameters_has_the_same_buckets(group) -> None:
    """So the key changes no bit, and is no part of what the training's numbers depend on."""
    assert buckets(2, unused=False) == buckets(2, unused=True)
