"""Every preset trains on the GPU as on the CPU, and resumes bit for bit."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gpu.conftest import ON_CPU, GpuTraining, Wholes
from tests.training.conftest import write_base
from tests.training.matrix import PRESETS, ROUNDED, deviation

from zerotrain.training.checkpointing import progress_folder

pytestmark = pytest.mark.gpu

STEPS, MIDDLE = 8, 4
FROM_CPU = {"no": 1e-4, "bf16": 1e-2, "fp16": 2e-3}
"""Relative deviation of the first loss, before any update, from the CPU's run of plain PyTorch in
the same precision: other kernels add in another order; in 16 bits twice the bound between engines,
as both sides round."""
BETWEEN = {"no": 1e-5, **ROUNDED}
"""Of a loss of any step from that of plain PyTorch on the GPU (docs/exactness.md)."""
CASES = [
    *((preset, "bf16") for preset in PRESETS),
    *((preset, "no") for preset in PRESETS),
    *((preset, "fp16") for preset in PRESETS),
]
VALUES: dict[str, Any] = {"gradient_accumulation_steps": 2, "lr_scheduler_steps": STEPS}


def values(precision: str) -> dict[str, Any]:
    """Of the phase; fp16's scale is one that the first steps do not overflow."""
    scale = {"fp16": {"initial_scale_power": 10}} if precision == "fp16" else {}
    return {**VALUES, "mixed_precision": precision, **scale}


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("preset", PRESETS)
def test_losses_are_those_of_the_cpu_and_of_plain_pytorch(
    wholes: Wholes, preset: str, precision: str
) -> None:
    """Finite and falling nowhere to zero; the first is the CPU's, all are plain PyTorch's."""
    made = values(precision)
    losses = wholes.losses(f"{preset}-{precision}", preset, STEPS, **made)
    torchs = wholes.losses(f"torch-{precision}", "torch", STEPS, **made)
    # The CPU computes float32 and bf16; fp16 is held to float32.
    computed = "no" if precision == "fp16" else precision
    on_cpu = wholes.on_cpu(f"cpu-{computed}", 1, **values(computed))
    assert len(losses) == STEPS
    assert all(math.isfinite(loss) and loss > 0 for loss in losses)
    apart, first = deviation(losses, torchs), deviation(losses[:1], on_cpu[:1])
    print(f"{preset} {precision}: first {first:.1e} from the CPU, all {apart:.1e} from torch")
    assert first <= FROM_CPU[precision]
    assert apart <= BETWEEN[precision]
    log = wholes.training.log(f"{preset}-{precision}")
    assert all(math.isfinite(line["grad_norm"]) for line in log if "loss" in line)


RESUMED = [
    *((preset, "bf16") for preset in PRESETS),
    ("torch", "no"), ("zero2_offload", "no"), ("zero3_offload", "no"),
    ("torch", "fp16"), ("zero2", "fp16"), ("zero3_offload", "fp16"),
]  # fmt: skip


@pytest.mark.parametrize(("preset", "precision"), RESUMED)
def test_resume_after_a_stop_and_after_a_kill_is_exact(
    training: GpuTraining, preset: str, precision: str
) -> None:
    """Losses, weights and moments have the bits of a training that was left alone: after an end in
    the middle, and after kill -9 of a process that has saved it. EMA and all."""
    made = {**values(precision), "use_ema": True, "ema_decay": 0.5, "save_every": 2, "keep": 9}
    whole = training.run("whole", preset, STEPS, **made)
    training.run("stopped", preset, MIDDLE, **made)
    assert training.run("stopped", preset, STEPS, **made) == whole
    assert training.hashes("stopped", STEPS) == training.hashes("whole", STEPS)
    training.phase("killed", preset, 1000, **made)
    process = training.start("killed")
    training.wait_for_step("killed", MIDDLE + 1, process)
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    saved = progress_folder.saved_steps(training.progress("killed"))
    assert saved
    # It has come as far as it has come: the rest is trained to the same number of steps.
    end = max(STEPS, saved[-1] + 2)
    assert training.run("killed", preset, end, **made)[:STEPS] == whole
    if end == STEPS or training.rolling("killed", STEPS).exists():
        assert training.hashes("killed", STEPS) == training.hashes("whole", STEPS)
    print(f"{preset} {precision}: killed after step {saved[-1]}, resumed to {end}")


@pytest.mark.parametrize("preset", ["torch", "zero2_offload"])
def test_resume_with_a_request_to_stop(training: GpuTraining, preset: str) -> None:
    """SIGTERM leaves a checkpoint; the next start ends in the undisturbed bits, in the default
    settings of torch (TF32 in convolutions)."""
    made = {**VALUES, "lr_scheduler_steps": 30, "global_batch_size": 8}
    whole = training.run("whole", preset, 30, **made)
    training.phase("stopped", preset, 30, **made)
    process = training.start("stopped")
    training.wait_for_step("stopped", 5, process)
    os.kill(process.pid, signal.SIGTERM)
    process.join(60)
    assert training.train("stopped") == whole
    assert training.hashes("stopped", 30) == training.hashes("whole", 30)


def test_loss_scale_recovers_from_overflow(training: GpuTraining) -> None:
    """A scale far too high: the first updates are left out under both engines, and the scale is the
    same number afterwards."""
    scales = {}
    for preset in ("torch", "zero2", "zero2_offload"):
        training.run(
            preset, preset, 12, mixed_precision="fp16", lr_warmup_steps=0,
            fp16={"initial_scale_power": 28, "hysteresis": 1},
        )  # fmt: skip
        position = training.checkpoint(preset, 12).position
        assert 0 < position.optimizer_step < 12
        scales[preset] = position.loss_scale
    print(scales)
    assert len({scale["scale"] for scale in scales.values() if scale}) == 1


@pytest.mark.usefixtures("swap_op")
def test_nvme_offload_has_the_bits_of_cpu_offload(training: GpuTraining, tmp_path: Path) -> None:
    """Parameters and optimizer on a disk: losses, weights and moments, also after a resume."""
    disk = tmp_path / "disk"
    disk.mkdir()
    training.base = tmp_path / "base"
    write_base(training.base, (33, 99))
    sizes = {
        "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0,
        "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0,
        "sub_group_size": 300_000,
    }  # fmt: skip

    def run(name: str, preset: str, until: int, path: str | None = None) -> list[float]:
        buffers = {"offload_param": {"buffer_size": 10**6}} if path else {}
        training.phase(
            name, preset, until, mixed_precision="bf16", offload_path=path,
            zero={**sizes, **buffers},
        )  # fmt: skip
        assert training.call_stage(name, "end") == 0
        return training.losses(name)

    expected = run("cpu", "zero3_offload", 4)
    run("nvme", "zero3_nvme", 2, str(disk))
    assert run("nvme", "zero3_nvme", 4, str(disk)) == expected
    ours, theirs = (training.checkpoint(name, 4) for name in ("nvme", "cpu"))
    for name in theirs.names:
        for slot in theirs.slots:
            assert torch.equal(ours.tensor(name, slot), theirs.tensor(name, slot)), (name, slot)
    assert list(disk.iterdir()) == []


@pytest.mark.skipif(
    not ON_CPU and torch.cuda.device_count() < 2, reason="two processes need two GPUs"
)
@pytest.mark.parametrize("preset", ["torch", "zero2", "zero3"])
def test_two_processes_train_as_one(training: GpuTraining, preset: str) -> None:
    """Losses within 1e-5 of one process's, and a resume in the middle to the same bits."""
    training.environment = {"NVIDIA_TF32_OVERRIDE": "0"}
    one = training.run("one", "torch", STEPS)
    assert deviation(training.assert_resumes(preset, MIDDLE, STEPS, num_processes=2), one) <= 1e-5
