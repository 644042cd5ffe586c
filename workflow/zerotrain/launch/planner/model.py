"""Models on the meta device: names, shapes and ties of parameters, without their data."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from zerotrain.config.adapters import method_of
from zerotrain.errors import PipelineError
from zerotrain.launch.planner.architecture import Architecture, Part
from zerotrain.launch.planner.trace_store import ModelShapes
from zerotrain.models.families.language import untie_head
from zerotrain.models.pretrained import from_config
from zerotrain.models.quantized_linear import QuantizedLinear, quantize_linear_layers
from zerotrain.models.trainable import choose_trained, trained_parameters

UNPADDED = "unpadded"
"""Name in transformers of torch's attention over sequences without padding."""


@dataclass(frozen=True, kw_only=True)
class TrainedModel(ModelShapes):
    """A run's model as the training uses it, with the trained part itself.

    Attributes:
        module: The trained part on the meta device, in train mode and with the adapter; frozen
            parameters require no gradient.
    """

    module: torch.nn.Module


def trained_model(
    architecture: Architecture,
    adapter: Mapping[str, Any] | None = None,
    frozen_parameters: Sequence[str] = (),
    trainable_parameters: Sequence[str] = (),
    precision: str = "no_change",
    exclude: Sequence[str] = (),
) -> TrainedModel:
    """Build the trained part and select its trained parameters.

    Args:
        architecture: See find_architecture.
        adapter: The result of RunConfig.adapter_values; None: no adapter.
        frozen_parameters: Regular expressions, searched for in names.
        trainable_parameters: The same; if there are any, no other parameter is trained.
        precision: Precision of frozen linear layers, as in base_model_precision.
        exclude: Names of layers that are not quantized.

    Raises:
        PipelineError: the class cannot be built, or a pattern or target matches nothing.
    """
    module = build_part(architecture.trained, architecture.source)
    if precision != "no_change":
        quantize_linear_layers(module, precision, exclude)
    module = choose_trained(module, adapter, frozen_parameters, 0, trainable_parameters)
    module.train()
    if method_of(adapter) is not None:
        from peft.tuners.lycoris_utils import LycorisLayer  # peft is slow to import

        for layer in module.modules():
            if isinstance(layer, LycorisLayer):  # in train mode it reads a random number's value
                layer.training = False
    quantized = {
        f"{name}.weight": layer
        for name, layer in module.named_modules()
        if isinstance(layer, QuantizedLinear)
    }
    return TrainedModel(
        architecture=architecture,
        shapes={
            **{name: tuple(p.shape) for name, p in module.named_parameters()},
            **{n: (layer.out_features, layer.in_features) for n, layer in quantized.items()},
        },
        trained=tuple(trained_parameters(module)),
        quantized={name: layer.nbytes for name, layer in quantized.items()},
        module=module,
    )


def build_part(part: Part, source: str) -> torch.nn.Module:
    """Build a part on the meta device.

    Raises:
        PipelineError: the library has no such class, or the configuration does not fit it.
    """
    try:
        cls: Any = getattr(importlib.import_module(part.library), part.class_name)
        with torch.device("meta"):
            if part.library == "diffusers":
                module: torch.nn.Module = from_config(cls, dict(part.config))
            else:
                module = cls(_transformers_config(cls, part.config))
                untie_head(module, part.config)
    except (AttributeError, TypeError, ValueError, KeyError, StrictDataclassError) as error:
        raise PipelineError(
            f"{source}: {part.library}'s {part.class_name} cannot be built from its config.json: "
            f"{error}",
            hint="check the file; a class that is newer than the installed library needs an update",
        ) from error
    return module


def _transformers_config(cls: Any, values: Mapping[str, Any]) -> Any:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    # Without padding the library omits masks, but not for fake tensors.
    AttentionInterface.register(UNPADDED, sdpa_attention_forward)
    AttentionMaskInterface.register(UNPADDED, lambda *_, **__: None)
    config = cls.config_class(**values)
    config._attn_implementation = UNPADDED
    return config
