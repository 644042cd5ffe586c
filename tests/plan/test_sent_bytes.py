"""What two processes send each other in a step is what benchmarks/scaling.py counts."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.builders.processes import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zerotrain.config.launch import LaunchConfig
from zerotrain.launch.derive import with_files
from zerotrain.launch.planner.inputs import PlannedLaunch

STEPS = 3
SMALL = 2000
"""Elements of norms and flags, which do not count."""
LIVE = 0.4
"""Share of the parameters that stage 3 keeps gathered."""


class Sent(TorchDispatchMode):
    """Counts the elements that a ring would pass on, once for a reduction and once for a gather."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            sizes = [x.numel() for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
            if max(sizes) > SMALL:  # whole tensors; the others are parts of them
                self.elements += max(sizes) * (2 if "allreduce" in str(func) else 1)
        return func(*args, **(kwargs or {}))


def _train(inputs: Path, folder: Path) -> None:
    from zerotrain.training import rank

    sent, totals = Sent(), []

    def ask() -> bool:
        totals.append(sent.elements)
        return len(totals) == STEPS

    vars(rank)["StopRequest"] = lambda progress: ask
    with sent:
        rank.run(folder / "launch", inputs / "base", inputs / "cache", folder / "progress")
    (folder / f"sent-{os.environ['RANK']}.json").write_text(json.dumps(totals))


@pytest.mark.parametrize(
    ("preset", "accumulation"),
    [
        pytest.param("zero2", 2, marks=pytest.mark.slow),
        pytest.param("zero3", 1, marks=pytest.mark.slow),
    ],
)
def test_a_step_sends_what_is_counted(
    preset: str, accumulation: int, tmp_path: Path, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 2 %: norms and biases are not partitioned by stage 3."""
    monkeypatch.syspath_prepend("benchmarks")
    memory, scaling = importlib.import_module("memory"), importlib.import_module("scaling_model")
    memory.make_inputs(tmp_path, [32, 96])
    sizes = memory.unet_sizes(tmp_path / "base")
    phase = memory.measured_phase(
        preset, sizes, STEPS + 1, num_processes=2, global_batch_size=2 * accumulation,
        gradient_accumulation_steps=accumulation,
    )  # fmt: skip
    live = int(LIVE * sizes.everything)
    keys = ("stage3_max_live_parameters", "stage3_max_reuse_distance")
    zero = dict.fromkeys(keys, live) | {"stage3_prefetch_bucket_size": live // 10}
    if preset == "zero3":
        phase = with_files(phase, LaunchConfig(deepspeed={"zero_optimization": zero}), sizes)
    memory.publish_launch(tmp_path / "launch", phase)
    (tmp_path / "progress").mkdir()
    run_ranks(server.Process, _train, 2, tmp_path, tmp_path)
    launch = PlannedLaunch.of(phase, zero)
    expected = scaling.sent_bytes(launch, sizes.trained, sizes.everything)
    for rank in range(2):
        totals = json.loads((tmp_path / f"sent-{rank}.json").read_text())
        assert 4 * (totals[-1] - totals[-2]) == pytest.approx(expected, rel=0.02)
