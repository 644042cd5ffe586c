"""ZeRO-2 with an offloaded optimizer starts with one copy of the weights on the device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import stage_1_and_2
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from tests.builders.processes import join_ranks, start_ranks

from zerotrain.training.engines.zero_corrections import one_copy_on_device

OWN = DeepSpeedZeroOptimizer.get_data_parallel_partitions


@pytest.fixture
def zero(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the partitions of two processes are made of."""
    monkeypatch.setattr(stage_1_and_2.dist, "get_world_size", lambda group: 2)
    return SimpleNamespace(real_dp_process_group=[None])


def masters(zero: Any, flat: torch.Tensor, dtype: torch.dtype = torch.float32) -> list[Any]:
    """As DeepSpeed makes them of flat weights."""
    partitions = DeepSpeedZeroOptimizer.get_data_parallel_partitions(zero, flat, 0)
    zero.partitions = partitions
    return [one.detach().clone().to(device="cpu", dtype=dtype) for one in partitions]


def test_masters_are_cloned_in_host_memory(zero: Any) -> None:
    """Memory of a meta tensor cannot be copied to the host: a clone on its device could be made."""
    flat = torch.empty(8, dtype=torch.bfloat16, device="meta")
    assert OWN(zero, flat, 0)[0].clone().is_meta
    with one_copy_on_device(alone=False):
        partition, _ = DeepSpeedZeroOptimizer.get_data_parallel_partitions(zero, flat, 0)
        with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
            partition.detach().clone()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_masters_are_the_weights_in_memory_of_their_own(zero: Any, dtype: torch.dtype) -> None:
    """Bit by bit; afterwards the partitions are plain views of the weights."""
    flat = torch.randn(8).to(dtype)
    with one_copy_on_device(alone=True):
        found = masters(zero, flat)
        assert get_accelerator().available_memory() == 0
    assert torch.equal(torch.cat(found), flat.float())
    assert {type(one) for one in (*found, *zero.partitions)} == {torch.Tensor}
    found[0].zero_()
    assert flat.all()
    zero.partitions[0].zero_()
    assert not flat[:4].any()
    assert DeepSpeedZeroOptimizer.get_data_parallel_partitions is OWN
    assert get_accelerator().available_memory() > 0


def _train_recorded(arguments: list[str], answers: Any) -> None:
    from zerotrain.training import rank
    from zerotrain.training.engines import zero_corrections

    found: list[str] = []
    flatten = DeepSpeedZeroOptimizer.flatten_dense_tensors_aligned
    clone = zero_corrections._ClonedToHost.clone

    def flattened(self: Any, tensors: Any, alignment: int, **options: Any) -> torch.Tensor:
        if "use_cpu_data" in options:  # those of a step are gradients
            found.append("flat on the host" if options["use_cpu_data"] else "flat on the device")
        return flatten(self, tensors, alignment, **options)

    def cloned(self: Any, **options: Any) -> torch.Tensor:
        found.append("cloned to the host")
        return clone(self, **options)

    DeepSpeedZeroOptimizer.flatten_dense_tensors_aligned = flattened
    zero_corrections._ClonedToHost.clone = cloned  # type: ignore[method-assign]
    rank.main(arguments)
    answers.put(set(found))


@pytest.mark.parametrize(
    ("preset", "processes", "expected"),
    [
        ("zero2_offload", 1, {"flat on the host", "cloned to the host"}),
        ("zero2_offload", 2, {"flat on the device", "cloned to the host"}),
        ("zero2", 1, {"flat on the device"}),
    ],
)
def test_an_offloaded_optimizer_alone_starts_through_the_host(
    training: Any, server: Any, preset: str, processes: int, expected: set[str]
) -> None:
    """Several processes would each hold the whole model in host memory."""
    training.phase("a", preset, 1, num_processes=processes, mixed_precision="bf16")
    training.progress("a").mkdir()
    answers, words = server.Queue(), training.words("a")
    ranks = start_ranks(
        server.Process, _train_recorded, processes, words, answers, output=training.output
    )
    join_ranks(ranks, training.output)
    assert [answers.get(timeout=10) for _ in ranks] == [expected] * processes
    assert len(training.losses("a")) == 1
