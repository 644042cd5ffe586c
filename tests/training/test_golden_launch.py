"""A run starts from each golden launch file, as it is, on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.training.conftest import Training

from zerotrain.machine import compiled_ops

GOLDEN = Path("tests/golden/launch/sdxl")
ZERO = sorted(path.name for path in GOLDEN.iterdir() if path.name != "torch")
SAMPLE = ("zero2_offload", "zero3", "zero3_nvme")
"""Of each class of DeepSpeed's optimizers one; `make test-soak` has the others."""
SWAP_OP = compiled_ops.ops_folder() / compiled_ops.SWAP_BUILT


VALUES = {
    "mixed_precision": "bf16", "num_processes": 2, "global_batch_size": 8,
    "gradient_accumulation_steps": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, inputs: Path, server: Any) -> list[float]:
    """The losses of plain PyTorch."""
    plain = Training(tmp_path_factory.mktemp("plain"), inputs, server)
    return plain.run("plain", "torch", 2, **VALUES)


@pytest.mark.slow
@pytest.mark.parametrize(
    "preset",
    [pytest.param(one, marks=() if one in SAMPLE else pytest.mark.soak) for one in ZERO],
)
def test_a_run_starts_from_the_golden_file(
    training: Any, tmp_path: Path, expected: list[float], preset: str
) -> None:
    """With SDXL's own buckets and limits, and learns what plain PyTorch learns."""
    if preset == "zero3_nvme" and not SWAP_OP.exists():
        pytest.skip(f"{compiled_ops.BUILD_SWAP_OP} was not run")
    path = {"offload_path": str(tmp_path)} if preset == "zero3_nvme" else {}
    training.phase(preset, preset, 2, **VALUES, **path)
    golden = json.loads((GOLDEN / preset / "deepspeed.json").read_text())
    for section in golden["zero_optimization"].values():
        if isinstance(section, dict) and "nvme_path" in section:
            section["nvme_path"] = str(tmp_path)
    written = training.folder / preset / "launch" / "deepspeed.json"
    written.write_text(json.dumps(golden))
    assert training.train(preset) == pytest.approx(expected, abs=5e-3)
