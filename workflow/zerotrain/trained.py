"""Which of a model's parameters are trained: an adapter's, or its own but for the frozen ones."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from zerotrain.errors import PipelineError
from zerotrain.parameter_patterns import is_frozen


def choose_trained(
    model: torch.nn.Module,
    adapter: Mapping[str, Any] | None,
    frozen_parameters: Sequence[str],
    seed: int,
    trainable_parameters: Sequence[str] = (),
) -> torch.nn.Module:
    """Let the parameters that are to be trained require gradients, and no others.

    Args:
        model: A denoiser or language model, also on the meta device.
        adapter: What RunConfig.adapter_values gives of one to add; None for none.
        frozen_parameters: Regular expressions that are searched for in names.
        seed: Decides the adapter's first weights.
        trainable_parameters: The same; if there are some, only what fits one is trained.

    Returns:
        The model; of an adapter to the prompt, one around it.

    Raises:
        PipelineError: a pattern fits no parameter, or nothing is left to train.
    """
    if adapter is not None:
        from zerotrain.families import adapters  # peft is slow to import

        model = adapters.add(model, adapter, seed)
    _freeze(model, frozen_parameters, trainable_parameters)
    return model


def trained_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """What is trained, by name; a tied parameter under the first of its names."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def refuse_other_parameters(
    found: Mapping[str, list[int]], trained: Mapping[str, list[int]], source: Path
) -> None:
    """Refuse tensors that are not those of the model that is trained.

    Raises:
        PipelineError: naming the first parameter that is missing, surplus or of another shape.
    """
    for name in sorted({*found, *trained}):
        if found.get(name) != trained.get(name):
            raise PipelineError(
                f"{source}: {name} has shape {found.get(name, 'none: it is absent')}, the "
                f"model that is trained has {trained.get(name, 'no such trained parameter')}",
                hint="base, lora, peft and frozen_parameters decide what is trained; they belong "
                "to a run and stay as they are over its phases",
            )


def refuse_idle(key: str, pattern: str, names: Sequence[str]) -> None:
    """Refuse a pattern that fits no name: a typing error would change what is trained, unseen."""
    if not any(re.search(pattern, name) for name in names):
        raise PipelineError(
            f"{key}: {pattern!r} is in the name of none of the {len(names)} parameters",
            hint=f"names look like {', '.join(list(names)[:3])}",
        )


def _freeze(model: torch.nn.Module, frozen: Sequence[str], trainable: Sequence[str]) -> None:
    names = [name for name, _ in model.named_parameters()]
    for key, patterns in (("frozen_parameters", frozen), ("trainable_parameters", trainable)):
        for pattern in patterns:
            refuse_idle(key, pattern, names)
    for name, parameter in model.named_parameters():
        if is_frozen(name, frozen, trainable):
            parameter.requires_grad_(False)
    if not trained_parameters(model):
        raise PipelineError(
            f"frozen_parameters: {', '.join(frozen)} leave no parameter to train"
            + (f" of trainable_parameters: {', '.join(trainable)}" if trainable else ""),
            hint="freeze less",
        )
