"""Prediction of a phase's needs under each preset, from the modules of the planner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from zerotrain.config import optimizers
from zerotrain.config.models import Phase
from zerotrain.config.stage_settings import PlannedRun
from zerotrain.launch.derive import overlay
from zerotrain.launch.planner.gpus import Gpu
from zerotrain.launch.planner.inputs import MemoryPart, PlannedLaunch, peak, resident_peak
from zerotrain.launch.planner.memory_parts import memory_parts, saves_nothing
from zerotrain.launch.planner.storage import (
    StepTime,
    Storage,
    Traffic,
    step_time,
    storage,
    swap_files,
    traffic,
)
from zerotrain.launch.planner.trace_store import TracedModel
from zerotrain.launch.preset import Preset, with_own_offload
from zerotrain.launch.resolved import Settings, nest_keys
from zerotrain.launch.zero import zero_optimization
from zerotrain.machine.detect import Engine
from zerotrain.models.sizes import ModelSizes

Mode = Literal["plain", "checkpointed", "on_host"]
MODES: dict[Mode, str] = {
    "plain": "activations kept",
    "checkpointed": "gradient_checkpointing",
    "on_host": "and cpu_checkpointing",
}
SWAP = "/"
"""Placeholder for offload_path, whose name changes no size."""


@dataclass(frozen=True)
class Prediction:
    """Needs of one launch, in bytes and per process unless stated otherwise."""

    preset: str
    launch: PlannedLaunch
    mode: Mode
    parts: tuple[MemoryPart, ...]
    swap: Mapping[str, int]
    """Bytes on the disk of offload_path, for all processes."""
    disk: tuple[Storage, ...]
    traffic: Traffic
    flops: float
    """Operations per step."""
    useless: str | None
    """Reason why ZeRO saves nothing here, if so."""

    @property
    def device(self) -> int:
        """Peak bytes on a device; on a CPU, the total of all processes."""
        if self.launch.cpu:
            return self.launch.processes * resident_peak(self.parts)[0]
        return peak(self.parts, "device")[0]

    @property
    def host(self) -> int:
        """Peak bytes in host memory, for all processes of the machine."""
        return 0 if self.launch.cpu else self.launch.processes * peak(self.parts, "host")[0]

    def time(self, gpu: Gpu, trained: int) -> StepTime:
        """Return an estimate of a step's time on that device."""
        on_host = trained if self.launch.offload_optimizer != "none" else 0
        own = on_host // self.launch.processes
        return step_time(self.flops, gpu, self.traffic, own, self.launch.processes)


def predict(
    config: PlannedRun,
    phase: Phase,
    preset: Preset,
    traced: TracedModel,
    mode: Mode,
    *,
    cpu: bool = False,
) -> Prediction:
    """Predict what the phase needs under a preset.

    Raises:
        PipelineError: the launch's own offload or keys do not fit the preset.
    """
    launch = phase.launch
    if preset.name == launch.preset:
        preset = with_own_offload(preset, launch, f"phase {phase.name}")
    engine: Engine = "torch" if preset.engine == "torch" else "deepspeed"
    train = phase.train
    name = optimizers.find(train.optimizer)[0].name
    planned = PlannedLaunch(
        engine=engine,
        stage=preset.zero_stage,
        offload_optimizer=preset.offload_optimizer,
        offload_param=preset.offload_param,
        mixed_precision=launch.mixed_precision,
        processes=launch.num_processes,
        init=launch.zero3_init and preset.zero_stage == 3,
        accumulation=phase.train.global_batch_size // (traced.batch * phase.launch.num_processes),
        zero=_zero(phase, preset, traced.sizes) if engine == "deepspeed" else {},
        slots=len(optimizers.slots(name, train.optimizer_args)),
        bf16_states=launch.bf16_optimizer_states,
        slot_bytes=partial(optimizers.state_bytes, name, train.optimizer_args)
        if optimizers.find(name)[0].eight_bit
        else None,
        cpu=cpu,
        keep=train.keep,
        average=train.use_ema,
        average_on_host=train.ema_device == "cpu",
    )
    traced_activations = traced.engines[engine]
    activations, on_host = {
        "plain": (traced_activations.peak, 0),
        "checkpointed": (traced_activations.peak_checkpointed, 0),
        "on_host": (traced_activations.peak_on_host, traced_activations.on_host),
    }[mode]
    parts = memory_parts(
        planned, traced.parameters, activations, on_host, casts_traced=engine == "torch"
    )
    samples = traced_activations.batch * planned.accumulation
    return Prediction(
        preset=preset.name,
        launch=planned,
        mode=mode,
        parts=tuple(parts),
        swap=swap_files(planned, traced.parameters) if preset.zero_stage == 3 else {},
        disk=tuple(storage(planned, traced.parameters, config.export.dtype)),
        traffic=traffic(planned, traced.parameters),
        flops=samples * traced_activations.flops_per_sample(mode != "plain"),
        useless=saves_nothing(planned),
    )


def _zero(phase: Phase, preset: Preset, sizes: ModelSizes) -> dict[str, Any]:
    settings: Settings = {
        f"zero_optimization.{key}": value
        for key, value in zero_optimization(
            preset.zero_stage, preset.offload_optimizer, preset.offload_param, SWAP,
            phase.launch.num_processes, sizes,
        ).items()
    }  # fmt: skip
    own = overlay(settings, "deepspeed", phase.launch.deepspeed, phase.name)
    section: dict[str, Any] = nest_keys({key: value for key, (value, _, _) in own.items()})
    return dict(section["zero_optimization"])
