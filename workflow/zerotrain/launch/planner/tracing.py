"""Traces of a phase's micro batches: read from the store, or made by torch.

torch and the model libraries are only imported to make a trace: importing them takes longer than
the rest of a plan whose trace is in the store.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Collection
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from zerotrain.config.models import Phase
from zerotrain.config.stage_settings import PlannedRun
from zerotrain.launch.planner import trace_store
from zerotrain.launch.planner.architecture import Architecture, find_architecture
from zerotrain.launch.planner.shape import Shape
from zerotrain.launch.planner.storage import parameters_of
from zerotrain.launch.planner.trace_store import ENGINES, Activations, ModelShapes, TracedModel
from zerotrain.machine.detect import Engine
from zerotrain.machine.progress_bar import Tell, ignore, progress_line


def trace(
    config: PlannedRun,
    phase: Phase,
    base: Path | None,
    *,
    cpu: bool = False,
    engines: Collection[Engine] = ENGINES,
) -> TracedModel:
    """Return the trace of the phase's own micro batch; see Tracer."""
    return Tracer(config, phase, base, cpu=cpu).trace(engines=engines)


class Tracer:
    """Tracer of a phase's micro batches under both engines; it builds the model at most once."""

    def __init__(
        self, config: PlannedRun, phase: Phase, base: Path | None, *, cpu: bool = False
    ) -> None:
        """Find the model's architecture.

        Args:
            config: The run's configuration.
            phase: The phase.
            base: Folder of the run's base model, if it exists.
            cpu: Whether it trains on the CPU.

        Raises:
            PipelineError: the architecture is unknown.
        """
        self._config, self._phase, self._cpu = config, phase, cpu
        self._base = str(base or config.base)
        self._side = None if config.is_text else config.phases[0].train.resolution
        self._key = trace_store.model_key(config, self._base, self._side)
        self._model: Any = None
        self._made: dict[tuple[int, int], TracedModel] = {}

    def trace(
        self,
        batch: int | None = None,
        size: int | None = None,
        engines: Collection[Engine] = ENGINES,
    ) -> TracedModel:
        """Return the trace of a micro batch.

        Args:
            batch: Samples of the micro batch; default: the phase's.
            size: Resolution, or length of rows; default: the phase's.
            engines: The engines to trace.

        Raises:
            PipelineError: the model cannot be built, or does not support such a batch.
        """
        batch = batch or micro_batch(self._phase)
        size = size or self._config.cache_size(self._phase)
        key = self._key_of(batch, size)
        known = self._made.get((batch, size)) or trace_store.read(key)
        if known is not None and set(engines) <= known.engines.keys():
            return known
        unit = "tokens" if self._config.is_text else "px"
        what = f"{self._config.family}, micro batch {batch} at {size} {unit}"
        with progress_line(written=self._model is not None) as tell:
            tell(f"planning {what}: this model is traced, which takes a while the first time")
            if self._model is None:
                tell(f"planning {what}: importing torch, and building the model without weights")
                self._model = self._build()
            engines_traced = self._trace(
                batch, size, engines, lambda text: tell(f"planning {what}: {text}")
            )
            made = TracedModel(
                self._shapes(), {**(known.engines if known else {}), **engines_traced}
            )
        self._made[batch, size] = made
        trace_store.write(key, made)
        return made

    def known(self) -> TracedModel | None:
        """Return the stored trace of the phase's micro batch under both engines; None without."""
        size = self._config.cache_size(self._phase)
        known = trace_store.read(self._key_of(micro_batch(self._phase), size))
        return known if known is not None and set(ENGINES) <= known.engines.keys() else None

    def _key_of(self, batch: int, size: int) -> dict[str, Any]:
        """Return all that the trace of a micro batch depends on."""
        return {
            **self._key, "batch": batch, "size": size,
            "precision": self._phase.launch.mixed_precision, "cpu": self._cpu,
            "conditioning": self._conditioning(size),
        }  # fmt: skip

    def _conditioning(self, size: int) -> tuple[int, int]:
        """Return the values by which conditioning images change the trace."""
        shape = Shape.of(self._config, self._base, 1, size)
        return shape.conditioning_images, shape.image_text_tokens

    def _build(self) -> Any:
        from zerotrain.launch.planner.model import trained_model

        config = self._config
        return trained_model(
            find_architecture(config.family, self._base, self._side),
            config.adapter_values(),
            config.frozen_parameters,
            config.trainable_parameters,
            config.base_model_precision,
            config.base_model_exclude_modules,
        )

    def _shapes(self) -> ModelShapes:
        """Return the model's shapes and each part's parameter count; building parts needs torch."""
        known: Architecture = self._model.architecture
        parts = {
            name: replace(part, parameters=parameters_of(part, known.source))
            for name, part in known.parts.items()
        }
        model = self._model
        whole = replace(known, parts=parts)
        return ModelShapes(whole, model.shapes, model.trained, model.quantized)

    def _trace(
        self, batch: int, size: int, engines: Collection[Engine], tell: Tell
    ) -> dict[Engine, Activations]:
        from zerotrain.launch.planner.activations import trace_activations

        shape = Shape.of(self._config, self._base, batch, size)
        precision, device = self._phase.launch.mixed_precision, "cpu" if self._cpu else "cuda"

        def traced(autocast: bool, tell: Tell = ignore) -> Activations:
            return trace_activations(
                self._model, shape, mixed_precision=precision, autocast=autocast, device=device,
                tell=tell,
            )  # fmt: skip

        if precision == "no":
            return dict.fromkeys(ENGINES, traced(False, tell))
        if len(engines) == 1:
            (engine,) = engines
            return {engine: traced(engine == "torch", tell)}
        # Each takes seconds on one core; a forked process already has the model and the libraries.
        global _TRACE
        _TRACE = traced
        with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
            torch = pool.submit(_trace_in_fork, True)
            deepspeed = traced(False, tell)
            tell("plain PyTorch")
            try:
                plain = torch.result()
            except RuntimeError:
                # A fork has none of the threads of autograd that a backward for a GPU started here:
                # https://github.com/pytorch/pytorch/wiki/Autograd-and-Fork
                plain = traced(True, tell)
            return {"torch": plain, "deepspeed": deepspeed}


def micro_batch(phase: Phase) -> int:
    """Return the samples of a micro batch on one process."""
    parts = phase.train.gradient_accumulation_steps * phase.launch.num_processes
    return phase.train.global_batch_size // parts


_TRACE: Any = None


def _trace_in_fork(autocast: bool) -> Activations:
    """Trace in the forked process, which inherits the closure: it cannot be pickled."""
    activations: Activations = _TRACE(autocast)
    return activations
