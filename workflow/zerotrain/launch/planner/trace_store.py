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
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from zerotrain.artifact import digest, write_whole
from zerotrain.artifact.documents import parse_json, read_object
from zerotrain.artifact.stage_versions import VERSIONS
from zerotrain.artifact.verdicts import verdicts_file
from zerotrain.config.stage_settings import PlannedRun
from zerotrain.launch.planner.architecture import Architecture, Part, find_architecture
from zerotrain.launch.planner.traced import Activations, ModelShapes, TracedModel
from zerotrain.machine.disk_errors import DiskError

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
        "libraries": [version(name) for name in LIBRARIES],
    }


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
