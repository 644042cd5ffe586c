"""The planner's memory of a device, held to what torch's allocator has given out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DDPMScheduler
from tests.builders.models import make_unet
from tests.builders.processes import join_ranks
from tests.gpu.conftest import ON_CPU, GpuTraining
from tests.gpu.jobs import train_measured
from tests.training.conftest import write_cache

from zerotrain import artifact
from zerotrain.launch.planner.activations import trace_activations
from zerotrain.launch.planner.architecture import Architecture, Part
from zerotrain.launch.planner.inputs import ParameterSizes, PlannedLaunch, peak
from zerotrain.launch.planner.memory_parts import memory_parts
from zerotrain.launch.planner.model import trained_model
from zerotrain.launch.planner.shape import Shape
from zerotrain.launch.resolved import ResolvedPhase

pytestmark = pytest.mark.gpu

CHANNELS = (32, 64) if ON_CPU else (640, 1280)
SIDE = 64 if ON_CPU else 256
BATCH = 4
BOUND = 0.05
"""Share of the measured peak by which a prediction may differ."""


@pytest.fixture
def large(training: GpuTraining, tmp_path: Path) -> GpuTraining:
    """A run of a U-Net whose weights and buffers outweigh what libraries take."""
    torch.manual_seed(0)
    unet = make_unet(CHANNELS, groups=8, attention_head_dim=8)
    print(f"{sum(p.numel() for p in unet.parameters()) / 1e6:.0f} M parameters")
    training.base, training.cache = tmp_path / "base", tmp_path / "cache"
    with artifact.publish(training.base, "base") as draft:
        unet.save_pretrained(draft.folder / "unet")
        DDPMScheduler(prediction_type="v_prediction").save_pretrained(draft.folder / "scheduler")
        draft.content = {"parts": {"unet": "made by hand"}}
    write_cache(training.cache, sizes=((SIDE, SIDE),))
    return training


def predicted(training: GpuTraining, phase: ResolvedPhase) -> int:
    """Peak bytes on the device."""
    config = json.loads((training.base / "unet/config.json").read_text())
    part = Part("diffusers", "UNet2DConditionModel", config)
    model: Any = trained_model(Architecture("sdxl", "large", {"unet": part}), None)
    plain = phase.derived.engine == "torch"
    precision = phase.launch.mixed_precision
    shape = Shape(BATCH, resolution=SIDE, tokens=5)
    found = trace_activations(model, shape, mixed_precision=precision, autocast=plain)
    file = training.folder / phase.phase / "launch/deepspeed.json"
    zero = {} if plain else json.loads(file.read_text())["zero_optimization"]
    activations = found.peak_checkpointed if phase.train.gradient_checkpointing else found.peak
    parts = memory_parts(
        PlannedLaunch.of(phase, zero), ParameterSizes.of(model.shapes), activations,
        casts_traced=plain,
    )  # fmt: skip
    bytes_, moment = peak(parts, "device")
    print(f"{phase.phase}: predicted {bytes_ / 2**20:.0f} MiB at {moment.value}")
    for one in parts:
        if one.where == "device":
            print(f"  {one.bytes / 2**20:8.1f} MiB {one.name}{' *' * (moment in one.when)}")
    return bytes_


TOO_MUCH = pytest.mark.xfail(
    not ON_CPU, reason="planned 10 to 15 % above the peak of an H200; why is not known", strict=True
)


@pytest.mark.parametrize(
    ("preset", "checkpointing"),
    [("torch", False), ("torch", True), ("zero1", False), ("zero2", False),
     pytest.param("zero2_offload", False, marks=TOO_MUCH), ("zero2_offload", True),
     ("zero3", False), pytest.param("zero3_offload", False, marks=TOO_MUCH),
     ("zero3_offload", True)],
)  # fmt: skip
def test_prediction_is_close_to_the_peak(
    large: GpuTraining, server: Any, preset: str, checkpointing: bool
) -> None:
    """Within a twentieth of max_memory_allocated, in bf16, over three steps and a checkpoint."""
    # ZeRO-3 with what the launch derives from the model's size, not with the tiny buffers.
    phase = large.phase(
        "a", preset, 3, mixed_precision="bf16", gradient_checkpointing=checkpointing,
        global_batch_size=BATCH, resolution=SIDE, lr_warmup_steps=0,
        zero={"contiguous_gradients": True} if preset.startswith("zero3") else None,
    )  # fmt: skip
    answers = server.Queue()
    ranks = large.start_job("a", 1, train_measured, answers)
    allocated, reserved = answers.get(timeout=200)
    join_ranks(ranks, large.output)
    assert len(large.losses("a")) == 3
    expected = predicted(large, phase)
    assert expected > 0
    if ON_CPU:
        return
    ratio = expected / allocated
    print(
        f"{preset} checkpointing={checkpointing}: allocated {allocated / 2**20:.0f} MiB, reserved "
        f"{reserved / 2**20:.0f} MiB, predicted over allocated {ratio:.3f}"
    )
    assert abs(ratio - 1) <= BOUND
