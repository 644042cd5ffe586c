"""Models on the meta device: names, shapes and ties of parameters, without their bytes."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from zerotrain.errors import PipelineError
from zerotrain.families.language import untie_head
from zerotrain.peft_methods import method_of
from zerotrain.plan.architecture import Architecture, Part
from zerotrain.trained import choose_trained, trained_parameters

UNPADDED = "unpadded"
"""torch's attention over sequences without padding, as transformers' models know it."""


@dataclass(frozen=True)
class TrainedModel:
    """A run's model as training sees it.

    Attributes:
        architecture: What the base is made of.
        module: The trained part on the meta device, in train mode, an adapter added; parameters
            that are not trained require no gradient.
    """

    architecture: Architecture
    module: torch.nn.Module

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each parameter, a tied one under the first of its names."""
        return {name: tuple(p.shape) for name, p in self.module.named_parameters()}

    @cached_property
    def trained(self) -> dict[str, tuple[int, ...]]:
        """The shape of each parameter that is trained."""
        return {name: tuple(p.shape) for name, p in trained_parameters(self.module).items()}

    @cached_property
    def parameters(self) -> int:
        """How many parameters there are."""
        return sum(p.numel() for p in self.module.parameters())

    @cached_property
    def trained_parameters(self) -> int:
        """How many parameters are trained."""
        return sum(p.numel() for p in trained_parameters(self.module).values())

    @cached_property
    def largest(self) -> int:
        """Elements of the largest parameter."""
        return max(p.numel() for p in self.module.parameters())


def trained_model(
    architecture: Architecture,
    adapter: Mapping[str, Any] | None = None,
    frozen_parameters: Sequence[str] = (),
    trainable_parameters: Sequence[str] = (),
) -> TrainedModel:
    """Build the trained part and choose what is trained of it.

    Args:
        architecture: See find_architecture.
        adapter: What RunConfig.adapter_values gives; None for none.
        frozen_parameters: Regular expressions that are searched for in names.
        trainable_parameters: The same; if there are some, the others are not trained.

    Raises:
        PipelineError: the class cannot be built, a pattern or target fits nothing.
    """
    module = build_part(architecture.trained, architecture.source)
    module = choose_trained(module, adapter, frozen_parameters, 0, trainable_parameters)
    module.train()
    if method_of(adapter) is not None:
        from peft.tuners.lycoris_utils import LycorisLayer  # peft is slow to import

        for layer in module.modules():
            if isinstance(layer, LycorisLayer):  # in train mode it looks at a random number's value
                layer.training = False
    return TrainedModel(architecture, module)


def build_part(part: Part, source: str) -> torch.nn.Module:
    """A part on the meta device.

    Raises:
        PipelineError: the library has no such class, or the configuration does not fit it.
    """
    try:
        cls: Any = getattr(importlib.import_module(part.library), part.class_name)
        with torch.device("meta"):
            if part.library == "diffusers":
                module: torch.nn.Module = cls.from_config(dict(part.config))
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


def parameters_of(part: Part, source: str) -> int:
    """How many parameters a part has, tied ones once; it is built where its count is not shipped.

    Raises:
        PipelineError: it cannot be built.
    """
    if part.parameters is not None:
        return part.parameters
    return sum(p.numel() for p in build_part(part, source).parameters())


def _transformers_config(cls: Any, values: Mapping[str, Any]) -> Any:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    # Without padding the library leaves masks out, but not where it sees fake tensors.
    AttentionInterface.register(UNPADDED, sdpa_attention_forward)
    AttentionMaskInterface.register(UNPADDED, lambda *_, **__: None)
    config = cls.config_class(**values)
    config._attn_implementation = UNPADDED
    return config
