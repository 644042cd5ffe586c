"""A whole phase under NVMe offload, stopped and resumed, has the bits of CPU offload."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.conftest import write_base

from zerotrain.machine import compiled_ops

SWAP_OP = compiled_ops.ops_folder() / compiled_ops.SWAP_BUILT
SIZES = {
    "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0, "sub_group_size": 300_000,
}  # fmt: skip

pytestmark = pytest.mark.skipif(
    not SWAP_OP.exists(), reason=f"{compiled_ops.BUILD_SWAP_OP} was not run"
)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A U-Net of the tiny one's inputs, but of several sub-groups that DeepSpeed swaps."""
    write_base(tmp_path / "base", (33, 99))
    return tmp_path / "base"


@pytest.mark.slow
@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_resume_under_nvme_offload_has_the_bits_of_cpu_offload(
    training: Any, base: Path, tmp_path: Path, processes: int
) -> None:
    """Losses, master weights and moments; and the disk is as it was."""
    disk = tmp_path / "disk"
    disk.mkdir()
    training.base = base

    shape = {"mixed_precision": "bf16", "num_processes": processes}
    expected = training.run("cpu", "zero3_offload", 4, zero=SIZES, **shape)

    def swap(until: int) -> None:
        # The derived buffers are for real models.
        zero = {**SIZES, "offload_param": {"buffer_size": 10**6}}
        training.phase("nvme", "zero3_nvme", until, zero=zero, offload_path=str(disk), **shape)
        assert training.call_stage("nvme", "end") == 0

    swap(2)
    swap(4)
    assert training.losses("nvme") == expected
    # What is swapped is written in another layout.
    ours, theirs = (training.checkpoint(name, 4) for name in ("nvme", "cpu"))
    assert ours.slots == theirs.slots
    for name, slot in product(theirs.names, theirs.slots):
        assert torch.equal(ours.tensor(name, slot), theirs.tensor(name, slot))
    assert list(disk.iterdir()) == []
