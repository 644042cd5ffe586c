"""What a phase would take under each preset: the parts of the planner put together."""

from __future__ import annotations

import multiprocessing
from collections.abc import Collection, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

from zerotrain import optimizers
from zerotrain.config import Phase, RunConfig
from zerotrain.errors import PipelineError
from zerotrain.launch.overrides import overlay
from zerotrain.launch.preset import Preset, with_own_offload
from zerotrain.launch.settings import Settings, nested
from zerotrain.launch.zero import zero_optimization
from zerotrain.machine.verdict import Engine
from zerotrain.model_sizes import ModelSizes, sum_up
from zerotrain.peft_methods import method_of
from zerotrain.plan.activations import Activations, trace_activations
from zerotrain.plan.architecture import find_architecture
from zerotrain.plan.forward import Shape
from zerotrain.plan.hardware import StepTime, step_time
from zerotrain.plan.inputs import ParameterSizes, PlannedLaunch
from zerotrain.plan.memory_parts import memory_parts, saves_nothing
from zerotrain.plan.model import TrainedModel, trained_model
from zerotrain.plan.parts import MemoryPart, peak, resident_peak
from zerotrain.plan.storage import Storage, Traffic, storage, swap_files, traffic

ENGINES: tuple[Engine, ...] = ("torch", "deepspeed")
Mode = Literal["plain", "checkpointed", "on_host"]
MODES: dict[Mode, str] = {
    "plain": "activations kept",
    "checkpointed": "gradient_checkpointing",
    "on_host": "and cpu_checkpointing",
}
SWAP = "/"
"""Stands for the disk of offload_path, whose name changes no size."""


@dataclass(frozen=True)
class Traced:
    """The model, and what a micro batch of it takes under the engines that were asked for."""

    model: TrainedModel
    engines: Mapping[Engine, Activations]

    @property
    def batch(self) -> int:
        """Samples of the micro batch."""
        return next(iter(self.engines.values())).batch

    @cached_property
    def parameters(self) -> ParameterSizes:
        """Every parameter's elements; one group of the optimizer."""
        return ParameterSizes.of(self.model.shapes, [list(self.model.trained)])

    @cached_property
    def sizes(self) -> ModelSizes:
        """What ZeRO's buckets are derived from."""
        parameters = self.parameters.parameters
        return sum_up(self.model.shapes, {name: parameters[name] for name in self.model.trained})


@dataclass(frozen=True)
class Prediction:
    """What one way of launching takes. Bytes; of one process where nothing else is said."""

    preset: str
    launch: PlannedLaunch
    mode: Mode
    parts: tuple[MemoryPart, ...]
    swap: Mapping[str, int]
    """On the disk of offload_path, all processes."""
    disk: tuple[Storage, ...]
    traffic: Traffic
    flops: float
    """Operations of a step."""
    useless: str | None
    """Why ZeRO saves nothing here, if so."""

    @property
    def device(self) -> int:
        """The most on a device; on a CPU, all there is of all processes."""
        if self.launch.cpu:
            return self.launch.processes * resident_peak(self.parts)[0]
        return peak(self.parts, "device")[0]

    @property
    def host(self) -> int:
        """The most in host memory, all processes of the machine."""
        return 0 if self.launch.cpu else self.launch.processes * peak(self.parts, "host")[0]

    def time(self, tflops: float, trained: int) -> StepTime:
        """An estimate of a step's seconds on a device of that peak."""
        on_host = trained if self.launch.offload_optimizer != "none" else 0
        own = on_host // self.launch.processes
        return step_time(self.flops, tflops, self.traffic, own, self.launch.processes)


def trace(
    config: RunConfig,
    phase: Phase,
    base: Path | None,
    *,
    cpu: bool = False,
    engines: Collection[Engine] = ENGINES,
) -> Traced:
    """Build the model without its weights, and trace a micro batch under both engines at once.

    Args:
        config: The run's configuration.
        phase: The phase.
        base: Folder of the run's base model, where it has one already.
        cpu: Whether it trains on the CPU.
        engines: Those to trace.

    Raises:
        PipelineError: the architecture is not known, the adapter's method cannot be traced, or
            the model cannot take such a batch.
    """
    method = method_of(config.adapter_values())
    if method is not None and not method.traced:
        raise PipelineError(
            f"peft: what {method.title} takes cannot be planned: its passes depend on values, and "
            "a plan has none",
            hint="plan a LoRA of the same layers (lora.rank), which takes about as much; launch: "
            "name a preset instead of auto",
        )
    architecture = find_architecture(config.family, str(base or config.base))
    model = trained_model(
        architecture,
        config.adapter_values(),
        config.frozen_parameters,
        config.trainable_parameters,
    )
    batch, size = _micro_batch(phase), config.cache_size(phase)
    return retrace(model, config, phase, batch, size, cpu=cpu, engines=engines)


def retrace(
    model: TrainedModel,
    config: RunConfig,
    phase: Phase,
    batch: int,
    size: int,
    *,
    cpu: bool = False,
    engines: Collection[Engine] = ENGINES,
) -> Traced:
    """The same of another micro batch, and of another resolution or length of rows."""
    sized = {"tokens" if config.is_text else "resolution": size}
    shape = Shape(batch=batch, max_sequence_length=config.cache.max_sequence_length, **sized)
    precision, device = phase.launch.mixed_precision, "cpu" if cpu else "cuda"

    def traced(autocast: bool) -> Activations:
        return trace_activations(
            model, shape, mixed_precision=precision, autocast=autocast, device=device
        )

    if precision == "no":
        found = traced(False)
        return Traced(model, dict.fromkeys(ENGINES, found))
    if len(engines) == 1:
        (engine,) = engines
        return Traced(model, {engine: traced(engine == "torch")})
    # Each takes seconds of one core; a forked process has the model and the libraries already.
    global _TRACE
    _TRACE = traced
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        torch = pool.submit(_traced, True)
        deepspeed = traced(False)
        return Traced(model, {"torch": torch.result(), "deepspeed": deepspeed})


_TRACE: Any = None


def _traced(autocast: bool) -> Activations:
    """In the forked process, where the closure that cannot be sent is there."""
    found: Activations = _TRACE(autocast)
    return found


def predict(
    config: RunConfig,
    phase: Phase,
    preset: Preset,
    traced: Traced,
    mode: Mode,
    *,
    cpu: bool = False,
) -> Prediction:
    """What the phase takes under a preset.

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
        accumulation=_accumulation(phase, traced.batch),
        zero=_zero(phase, preset, traced.sizes) if engine == "deepspeed" else {},
        slots=len(optimizers.slots(name, train.optimizer_args)),
        slot_bytes=partial(optimizers.state_bytes, name, train.optimizer_args)
        if optimizers.find(name)[0].eight_bit
        else None,
        cpu=cpu,
        keep=train.keep,
        average=train.use_ema,
        average_on_host=train.ema_device == "cpu",
    )
    found = traced.engines[engine]
    activations, on_host = {
        "plain": (found.peak, 0),
        "checkpointed": (found.peak_checkpointed, 0),
        "on_host": (found.peak_on_host, found.on_host),
    }[mode]
    parts = memory_parts(
        planned, traced.parameters, activations, on_host, casts_traced=engine == "torch"
    )
    samples = found.batch * planned.accumulation
    return Prediction(
        preset=preset.name,
        launch=planned,
        mode=mode,
        parts=tuple(parts),
        swap=swap_files(planned, traced.parameters) if preset.zero_stage == 3 else {},
        disk=tuple(storage(planned, traced.parameters, config.export.dtype)),
        traffic=traffic(planned, traced.parameters),
        flops=samples * found.flops_per_sample(mode != "plain"),
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
    section: dict[str, Any] = nested({key: value for key, (value, _, _) in own.items()})
    return dict(section["zero_optimization"])


def _micro_batch(phase: Phase) -> int:
    parts = phase.train.gradient_accumulation_steps * phase.launch.num_processes
    return phase.train.global_batch_size // parts


def _accumulation(phase: Phase, micro_batch: int) -> int:
    return phase.train.global_batch_size // (micro_batch * phase.launch.num_processes)
