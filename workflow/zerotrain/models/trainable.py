"""The trained parameters of a model: an adapter's, or its own except for frozen ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from zerotrain.config.trained_part import check_pattern_matches, is_frozen
from zerotrain.errors import PipelineError


def choose_trained(
    model: torch.nn.Module,
    adapter: Mapping[str, Any] | None,
    frozen_parameters: Sequence[str],
    seed: int,
    trainable_parameters: Sequence[str] = (),
) -> torch.nn.Module:
    """Make the trained parameters, and no others, require gradients.

    Args:
        model: A denoiser or language model, also on the meta device.
        adapter: The adapter to add, from RunConfig.adapter_values; None for none.
        frozen_parameters: Regular expressions that are searched for in names.
        seed: Decides the adapter's initial weights.
        trainable_parameters: Regular expressions; if any, only parameters with a match are trained.

    Returns:
        The model, or for an adapter to the prompt a model around it.

    Raises:
        PipelineError: a pattern matches no parameter, or nothing is left to train.
    """
    if adapter is not None:
        from zerotrain.models.families import adapters  # peft is slow to import

        model = adapters.add(model, adapter, seed)
    _freeze(model, frozen_parameters, trainable_parameters)
    return model


def trained_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the trained parameters by name; a tied one has the first of its names."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def check_same_parameters(
    found: Mapping[str, list[int]], trained: Mapping[str, list[int]], source: Path
) -> None:
    """Check that tensors have the names and shapes of the trained parameters.

    Raises:
        PipelineError: a parameter is missing, surplus or of another shape; the first is named.
    """
    for name in sorted({*found, *trained}):
        if found.get(name) != trained.get(name):
            raise PipelineError(
                f"{source}: {name} has shape {found.get(name, 'none: it is absent')}, the "
                f"model that is trained has {trained.get(name, 'no such trained parameter')}",
                hint="base, lora, peft and frozen_parameters decide what is trained; they belong "
                "to a run and stay as they are over its phases",
            )


def _freeze(model: torch.nn.Module, frozen: Sequence[str], trainable: Sequence[str]) -> None:
    names = [name for name, _ in model.named_parameters()]
    for key, patterns in (("frozen_parameters", frozen), ("trainable_parameters", trainable)):
        for pattern in patterns:
            check_pattern_matches(key, pattern, names)
    for name, parameter in model.named_parameters():
        if is_frozen(name, frozen, trainable):
            parameter.requires_grad_(False)
    if not trained_parameters(model):
        raise PipelineError(
            f"frozen_parameters: {', '.join(frozen)} leave no parameter to train"
            + (f" of trainable_parameters: {', '.join(trainable)}" if trainable else ""),
            hint="remove a pattern of frozen_parameters, or add one to trainable_parameters",
        )
