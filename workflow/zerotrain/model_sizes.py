"""What a launch depends on of a model: how many parameters, and how large they are.

Read from the headers of the base model's files, so neither torch nor the weights are needed.
"""

from __future__ import annotations

import importlib
import json
import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerotrain.artifact import Artifact
from zerotrain.errors import PipelineError
from zerotrain.lora_targets import targeted
from zerotrain.parameter_patterns import is_frozen
from zerotrain.peft_methods import method_of

MAX_HEADER = 100 * 1024**2
"""Safetensors' own limit."""
TRAINED = re.compile(r"(unet|transformer)/[^/]+\.safetensors|model[^/]*\.safetensors")
"""Files of the part that training changes: a sub-folder's in diffusers' layout, at the root in
transformers'."""
POSITIONS = "pos_embed"
"""SD3 keeps its fixed table of positions in the file, which is no parameter."""


@dataclass(frozen=True)
class ModelSizes:
    """Numbers of elements, never of bytes."""

    everything: int
    """All parameters, an adapter's with them."""
    trained: int
    largest: int
    """The largest parameter."""
    largest_name: str
    largest_trained: int
    largest_vector: int
    """The largest parameter of one dimension: norms and biases are."""


def read_sizes(
    base: Artifact,
    family: str,
    adapter: Mapping[str, Any] | None,
    frozen_parameters: Sequence[str],
    trainable_parameters: Sequence[str] = (),
) -> ModelSizes:
    """Sizes of the part of a base model that is trained.

    Args:
        base: The base model.
        family: Its family.
        adapter: What is trained instead, as RunConfig.adapter_values gives it; None for nothing.
        frozen_parameters: Regular expressions; parameters whose names contain one are not trained.
        trainable_parameters: The same; if there are some, parameters that contain none are not.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name in base.files:
        if TRAINED.fullmatch(name):
            shapes |= read_header(base.path(name))
    shapes = {name: shape for name, shape in shapes.items() if not name.endswith(POSITIONS)}
    if method_of(adapter) is not None:
        # By name: only peft itself knows what another method than LoRA adds, and it takes torch.
        adapters = importlib.import_module("zerotrain.families.adapters")
        return sum_up(shapes, adapters.count(family, base.folder, adapter))
    return model_sizes(shapes, adapter, frozen_parameters, trainable_parameters)


def model_sizes(
    shapes: Mapping[str, Sequence[int]],
    lora: Mapping[str, Any] | None = None,
    frozen_parameters: Sequence[str] = (),
    trainable_parameters: Sequence[str] = (),
) -> ModelSizes:
    """Sizes of a model whose parameters have these shapes, with a LoRA or none; see read_sizes."""
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    if lora is None:
        trained = {
            name: size
            for name, size in sizes.items()
            if not is_frozen(name, frozen_parameters, trainable_parameters)
        }
    else:
        trained = _adapter(shapes, lora)
    return sum_up(shapes, trained)


def sum_up(shapes: Mapping[str, Sequence[int]], trained: Mapping[str, int]) -> ModelSizes:
    """Sizes of a model with these shapes, of which these are trained; an adapter's come on top."""
    sizes = {**{name: math.prod(shape) for name, shape in shapes.items()}, **trained}
    largest = max(sizes, key=lambda name: sizes[name])
    vectors = (sizes[name] for name, shape in shapes.items() if len(shape) == 1)
    return ModelSizes(
        everything=sum(sizes.values()),
        trained=sum(trained.values()),
        largest=sizes[largest],
        largest_name=largest,
        largest_trained=max(trained.values(), default=0),
        largest_vector=max(vectors, default=0),
    )


def read_header(path: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of a safetensors file, by name; no tensor is read.

    Raises:
        PipelineError: the file is missing, cut off or no safetensors file.
    """
    try:
        with path.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > MAX_HEADER:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(stream.read(length))
        return {
            name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"
        }
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError) as error:
        raise PipelineError(
            f"{path}: the header of a safetensors file cannot be read ({error})",
            hint="check the path; copy or download the file again",
        ) from error


def _adapter(shapes: Mapping[str, Sequence[int]], lora: Mapping[str, Any]) -> dict[str, int]:
    """The two factors for each layer that is a target, and DoRA's magnitudes."""
    found: dict[str, int] = {}
    for name, shape in shapes.items():
        layer, _, kind = name.rpartition(".")
        if kind == "weight" and targeted(layer, shape, lora["target_modules"]):
            found[f"{layer}.lora_A"] = lora["rank"] * (math.prod(shape) // shape[0])
            found[f"{layer}.lora_B"] = lora["rank"] * shape[0]
            if lora.get("use_dora"):
                found[f"{layer}.lora_magnitude_vector"] = shape[0]
    return found
