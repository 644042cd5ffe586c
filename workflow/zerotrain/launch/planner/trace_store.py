"""Store of traces on this machine, keyed by all that they depend on: a plan is only traced once.

They are in $XDG_CACHE_HOME/zerotrain/plans or ~/.cache/zerotrain/plans, which may be removed at any
time. A file that is damaged, or of another version of the code, is traced again; if the folder is
not writable, no trace is kept.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any

from zerotrain.artifact import digest, write_whole
from zerotrain.artifact.documents import parse_json, read_object
from zerotrain.artifact.stage_versions import VERSIONS
from zerotrain.artifact.verdicts import verdicts_file
from zerotrain.config.stage_settings import PlannedRun
from zerotrain.launch.planner.architecture import Architecture, Part, find_architecture
from zerotrain.launch.planner.inputs import ParameterSizes
from zerotrain.machine.detect import Engine
from zerotrain.machine.disk_errors import DiskError
from zerotrain.models.sizes import ModelSizes, sum_up

ENGINES: tuple[Engine, ...] = ("torch", "deepspeed")


@dataclass(frozen=True)
class Activations:
    """Memory of one micro batch on a process's device, in bytes, without parameters.

    A peak is the maximum over a forward and backward pass of the bytes alive: tensors saved for the
    backward pass, temporaries of operations, and one parameter's gradient at a time.

    Attributes:
        saved: Bytes saved for the backward pass without checkpointing.
        peak: The peak without checkpointing.
        checkpointed: Bytes saved with gradient checkpointing: the blocks' inputs, and tensors saved
            outside of the blocks.
        peak_checkpointed: The peak with gradient checkpointing.
        on_device: Bytes saved on the device if the blocks' inputs go to the host.
        on_host: The copies of the blocks' inputs on the host (DeepSpeed's cpu_checkpointing).
        peak_on_host: The peak on the device if the blocks' inputs go to the host.
        blocks: Number of checkpointed blocks.
        batch: Samples of the micro batch.
        forward_flops: Operations of the forward pass, a multiply-add as two.
        backward_flops: Operations of the backward pass, without any recomputation.
        recomputed_flops: Operations that checkpointing adds.
    """

    saved: int
    peak: int
    checkpointed: int
    peak_checkpointed: int
    on_device: int
    on_host: int
    peak_on_host: int
    blocks: int
    batch: int
    forward_flops: int
    backward_flops: int
    recomputed_flops: int

    def flops_per_sample(self, checkpointing: bool) -> float:
        """Return the operations of training on one sample."""
        more = self.recomputed_flops if checkpointing else 0
        return (self.forward_flops + self.backward_flops + more) / self.batch


@dataclass(frozen=True)
class ModelShapes:
    """A run's model as the training uses it.

    Attributes:
        architecture: Parts of the base.
        shapes: The shape of each parameter, a tied one under the first of its names.
        trained: Names of the trained parameters.
        quantized: Bytes of each quantized parameter.
    """

    architecture: Architecture
    shapes: Mapping[str, tuple[int, ...]]
    trained: tuple[str, ...]
    quantized: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(map(prod, self.shapes.values()))

    @cached_property
    def trained_parameters(self) -> int:
        """Number of trained parameters."""
        return sum(prod(self.shapes[name]) for name in self.trained)


@dataclass(frozen=True)
class TracedModel:
    """The model, and the memory of a micro batch under the requested engines."""

    model: ModelShapes
    engines: Mapping[Engine, Activations]

    @property
    def batch(self) -> int:
        """Samples of the micro batch."""
        return next(iter(self.engines.values())).batch

    @cached_property
    def parameters(self) -> ParameterSizes:
        """Elements of every parameter; the optimizer has one group."""
        return ParameterSizes.of(
            self.model.shapes, [list(self.model.trained)], quantized=self.model.quantized
        )

    @cached_property
    def sizes(self) -> ModelSizes:
        """Sizes from which ZeRO's buckets are derived."""
        parameters = self.parameters.parameters
        return sum_up(self.model.shapes, {name: parameters[name] for name in self.model.trained})


MOST = 64
"""Number of traces that are kept, the most recently used ones; each has about 100 kB."""
VERSION = 2
"""Raised by whoever changes what a trace or a forecast of the same model says."""
LIBRARIES = ("torch", "diffusers", "transformers", "peft")


def folder() -> Path:
    """Return the folder of the traces."""
    return verdicts_file().with_name("plans")


def model_key(config: PlannedRun, base: str, side: int | None) -> dict[str, Any]:
    """Return what the trained model depends on, with the versions of what builds and traces it.

    Args:
        config: The run's configuration.
        base: Its base, or the folder of the base artifact.
        side: Side of the images for which a preset's model is built.

    Raises:
        PipelineError: the base's architecture is unknown.
    """
    preset = config.is_preset and base == config.base
    # A preset's architecture needs torch to build: its name and version are enough.
    model = [base, side] if preset else asdict(find_architecture(config.family, base))
    return {
        "model": model,
        "family": config.family,
        "adapter": config.adapter_values(),
        "frozen": config.frozen_parameters,
        "trainable": config.trainable_parameters,
        "precision": [config.base_model_precision, config.base_model_exclude_modules],
        "tokens": config.cache.max_sequence_length,
        "versions": [VERSION, VERSIONS["build_base"]],
        "libraries": _versions(),
    }


@cache
def _versions() -> list[str]:
    return [version(name) for name in LIBRARIES]


def read(key: Mapping[str, Any]) -> TracedModel | None:
    """Return the trace of this key; None if it is missing or damaged."""
    try:
        path = _path(key)
        document = read_object(path)
        content = document["content"]
        if document["sha256"] != digest(content):
            return None
        traced = _read_traced(content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError):
        return None
    with contextlib.suppress(OSError):
        os.utime(path)
    return traced


def write(key: Mapping[str, Any], traced: TracedModel) -> None:
    """Write a trace atomically, and remove the least recently used ones."""
    model = traced.model
    content = {
        "architecture": asdict(model.architecture),
        "shapes": model.shapes,
        "trained": model.trained,
        "quantized": model.quantized,
        "engines": {name: asdict(activations) for name, activations in traced.engines.items()},
    }
    try:
        content = parse_json(json.dumps(content), "a trace")
        path = _path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({"sha256": digest(content), "content": content}))
        _remove_oldest(path.parent)
    except (OSError, DiskError, TypeError, ValueError, RuntimeError):
        return  # no home, a full disk, or values that JSON cannot represent: traced again next time


def _path(key: Mapping[str, Any]) -> Path:
    return folder() / f"{digest(parse_json(json.dumps(key, default=str), 'a key'))}.json"


def _remove_oldest(place: Path) -> None:
    files = []
    for path in place.glob("*.json"):
        with contextlib.suppress(OSError):
            files.append((path.stat().st_mtime, path))
    for _, path in sorted(files)[:-MOST]:
        path.unlink(missing_ok=True)


def _read_traced(content: Mapping[str, Any]) -> TracedModel:
    architecture = content["architecture"]
    parts = {name: Part(**part) for name, part in architecture["parts"].items()}
    model = ModelShapes(
        Architecture(architecture["family"], architecture["source"], parts),
        {name: tuple(shape) for name, shape in content["shapes"].items()},
        tuple(content["trained"]),
        content["quantized"],
    )
    engines = {name: Activations(**values) for name, values in content["engines"].items()}
    return TracedModel(model, engines)
