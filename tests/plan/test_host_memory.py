"""What trainings on this machine's CPU take of its memory is what the planner says, within 5 %."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.builders.processes import run_ranks

from zerotrain.stages.train_phase import ALLOCATOR

sys.path.append(str(Path(__file__).parents[2]))  # `pytest` alone does not find the benchmarks
from benchmarks.memory import increase, make_inputs, predict, trace, watch_training, write_launch

CHANNELS = [256, 640]
"""92 million parameters: what does not grow with the model, some 30 MB, is then little."""
M_MMAP_THRESHOLD = -3
SLOW = ["zero1:bf16:2", "zero3_offload:bf16"]
"""Two processes and an offload; `make test-soak` has a case of each engine."""
SOAK = ["torch:no", "zero2_offload:no:2", "zero2:bf16", "zero3:bf16:2", "zero3_offload:no:2:init"]


def _train(inputs: Path, modules: Path, folder: Path) -> None:
    # As MALLOC_MMAP_THRESHOLD_ does at a process's start.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, int(ALLOCATOR["MALLOC_MMAP_THRESHOLD_"]))
    found = watch_training(inputs, folder / "launch", folder / "progress", modules)
    (folder / f"found-{os.environ['RANK']}.json").write_text(json.dumps(found))


def _measure(server: Any, case: str, inputs: Path, modules: Path, folder: Path) -> dict[str, int]:
    """Train a case in processes of its own; the most memory at each moment of the largest."""
    write_launch(folder / "launch", case, inputs / "base")
    (folder / "progress").mkdir()
    world = int([*case.split(":"), "1"][2])
    run_ranks(server.Process, _train, world, inputs, modules, folder)
    found = [json.loads((folder / f"found-{number}.json").read_text()) for number in range(world)]
    return max(found, key=increase)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory")
    make_inputs(folder, CHANNELS)
    return folder


@pytest.fixture(scope="module")
def modules(server: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that names what any training imports."""
    folder = tmp_path_factory.mktemp("small")
    make_inputs(folder, [32, 64])
    _measure(server, "zero2_offload:bf16", folder, folder / "modules", folder)
    return folder / "modules"


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW),
        *(pytest.param(case, marks=pytest.mark.soak) for case in SOAK),
    ],
)
def test_host_memory_is_predicted(
    case: str, inputs: Path, modules: Path, tmp_path: Path, server: Any
) -> None:
    """The most anonymous and shared memory, above that of the process before it began."""
    found = _measure(server, case, inputs, modules, tmp_path)
    measured = increase(found)
    said = predict(tmp_path / "launch", inputs, trace(inputs, case.split(":")[1]))
    assert max(said.values()) == pytest.approx(measured, rel=0.05), (found, said)
