"""The sizes of a model that a launch depends on: the number of parameters, and the largest.

They are read from the headers of the base model's files, without torch or the weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zerotrain.artifact import Artifact
from zerotrain.artifact.documents import read_header
from zerotrain.artifact.layout import rebuild_hint
from zerotrain.config.adapters import is_targeted, method_of, stack_of
from zerotrain.config.trained_part import is_frozen
from zerotrain.errors import PipelineError

TRAINED = re.compile(r"(unet|transformer)/[^/]+\.safetensors|model[^/]*\.safetensors")
"""Files of the trained part: in a sub-folder in diffusers' layout, at the root in transformers'."""
POSITIONS = "pos_embed"
"""The fixed table of positions in SD3's file, which is not a parameter."""


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model in elements, not bytes."""

    everything: int
    """All parameters, including an adapter's."""
    trained: int
    largest: int
    """The largest parameter."""
    largest_name: str
    largest_trained: int
    largest_vector: int
    """The largest parameter of one dimension, such as a norm or bias."""


def read_sizes(
    base: Artifact,
    family: str,
    adapter: Mapping[str, Any] | None,
    frozen_parameters: Sequence[str],
    trainable_parameters: Sequence[str] = (),
) -> ModelSizes:
    """Read the sizes of the trained part of a base model.

    Args:
        base: The base model.
        family: Its family.
        adapter: The adapter to train instead, from RunConfig.adapter_values; None for none.
        frozen_parameters: Regular expressions; parameters with a match in the name are not trained.
        trainable_parameters: Regular expressions; if any, parameters without a match are not.

    Raises:
        PipelineError: it has no tensor of that part, or the header of a file is damaged.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name in base.files:
        if TRAINED.fullmatch(name):
            shapes |= read_header(base.path(name), follow_links=True).shapes
    shapes = {name: shape for name, shape in shapes.items() if not name.endswith(POSITIONS)}
    if not shapes:
        raise PipelineError(
            f"{base.folder}: no tensor of the model that is trained is in its files",
            hint=rebuild_hint(base.folder, base.kind),
        )
    if adapter is not None and method_of(adapter) is not None:
        # Only peft knows what methods other than LoRA add, and it needs torch.
        from zerotrain.models.families import adapters

        return sum_up(shapes, adapters.count(family, base.folder, adapter))
    return model_sizes(shapes, adapter, frozen_parameters, trainable_parameters)


def model_sizes(
    shapes: Mapping[str, Sequence[int]],
    lora: Mapping[str, Any] | None = None,
    frozen_parameters: Sequence[str] = (),
    trainable_parameters: Sequence[str] = (),
) -> ModelSizes:
    """Compute the sizes of a model of these shapes, with or without a LoRA; see read_sizes."""
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
    """Sum up a model's shapes and the sizes of its trained parameters, an adapter's included."""
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


def _adapter(shapes: Mapping[str, Sequence[int]], lora: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of all factors and magnitudes; fused layers share their first factor."""
    found: dict[str, int] = {}
    for name, shape in shapes.items():
        layer, _, kind = name.rpartition(".")
        if shape and kind == "weight" and is_targeted(layer, shape, lora["target_modules"]):
            first = stack_of(layer) if lora.get("fused_layers") else layer
            found[f"{first}.lora_A"] = lora["rank"] * math.prod(shape[1:])
            found[f"{layer}.lora_B"] = lora["rank"] * shape[0]
            if lora.get("use_dora"):
                found[f"{layer}.lora_magnitude_vector"] = shape[0]
    return found
