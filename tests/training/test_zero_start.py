"""How the processes of a ZeRO training meet: each on its device, and every wait has an end."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from tests.builders.processes import run_ranks

from zerotrain.training.engines import zero_engine

SECONDS = 77


def _meet() -> None:
    from deepspeed.utils import groups

    zero_engine.init_distributed(timedelta(seconds=SECONDS))
    zero_engine.init_distributed()  # as the engine does, later
    for group in (torch.distributed.group.WORLD, groups._clone_world_group()):
        backend: Any = group._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
        assert backend.options._timeout == timedelta(seconds=SECONDS)


def test_the_time_out_is_that_of_zeros_own_group(server: Any) -> None:
    """launch.ddp_timeout reaches the group over which DeepSpeed reduces gradients."""
    run_ranks(server.Process, _meet, 1, seconds=60)


def test_a_process_takes_its_device_before_it_meets_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else all processes of a machine would exchange their first objects over device 0."""
    calls: list[Any] = []

    class Accelerator:
        def communication_backend_name(self) -> str:
            return "nccl"

        def set_device(self, number: int) -> None:
            calls.append(number)

    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(zero_engine, "device_type", lambda: "cuda")
    monkeypatch.setattr(zero_engine, "get_accelerator", Accelerator)
    monkeypatch.setattr(
        zero_engine.deepspeed, "init_distributed", lambda **words: calls.append(words)
    )
    zero_engine.init_distributed()
    assert calls == [3, {"dist_backend": "nccl", "verbose": False}]
