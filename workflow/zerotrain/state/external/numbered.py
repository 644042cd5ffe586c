"""Checkpoints with torch's numbered optimizer parameters, which get the model's names back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from zerotrain.errors import PipelineError
from zerotrain.state.external.checkpoint import (
    ExternalCheckpoint,
    NumberedWeights,
    TorchOptimizer,
    Weights,
    external_state,
)
from zerotrain.state.external.consistency import group_values
from zerotrain.state.position import ADAM_SLOTS, MASTER


def find_ties(weights: Weights) -> dict[str, str]:
    """Find second names of one tensor: torch.save keeps shared storage shared.

    Use it only for weights that are all in memory at once, so that their addresses are unique.
    """
    first: dict[tuple[int, torch.Size], str] = {}
    ties: dict[str, str] = {}
    for name, tensor in weights.items():
        owner = first.setdefault((tensor.data_ptr(), tensor.shape), name)
        if owner != name and tensor.numel():
            ties[name] = owner
    return ties


def open_numbered(
    folder: Path,
    weights: Weights,
    optimizer: TorchOptimizer,
    *,
    step: int | None,
    samples: int,
    engine: dict[str, Any],
    loss_scale: dict[str, Any] | None,
    tied: Mapping[str, str] = MappingProxyType({}),
    lost: Sequence[str] = (),
) -> ExternalCheckpoint:
    """Open a checkpoint of named weights and a torch optimizer.

    Args:
        folder: For messages.
        weights: Every tensor by name, in any dtype, without second names; mapped, or read on
            access.
        optimizer: Its state; it is omitted if names are uncertain, and `lost` reports that.
        tied: Second names of tensors.
        step: Optimizer steps, if the caller has a better source than the optimizer.

    Raises:
        PipelineError: names are missing from the weights, or shapes differ.
    """

    def name(names: Sequence[str] | None, given: Sequence[str]) -> ExternalCheckpoint:
        if missing := [name for name in given if name not in weights]:
            raise PipelineError(
                f"{folder}: {missing[0]} and {len(missing) - 1} more of the given parameters are "
                f"not in its weights, whose names are like {next(iter(weights), 'none')}",
                hint="give the names as the weights' file has them",
            )
        floats = [name for name, tensor in weights.items() if tensor.is_floating_point()]
        trained = list(given or names or floats)
        known = set(trained)
        name_of = dict(zip(optimizer.numbers, names or (), strict=False))
        number_of = {name: number for number, name in name_of.items() if name in known}
        adam = bool(number_of) and optimizer.keys.issuperset(ADAM_SLOTS)

        def pieces(name: str, slot: str) -> Iterable[torch.Tensor]:
            if slot == MASTER:
                return (weights[name],)
            entry = optimizer.state.get(number_of[name])
            return (entry[slot] if entry else torch.zeros(weights[name].shape),)

        if number_of:
            members = [
                [name_of[number] for number in group["params"] if name_of[number] in known]
                for group in optimizer.groups
            ]
        else:  # with one group its members are known anyway
            members = [trained] if len(optimizer.groups) == 1 else []
        param_groups, unlike_adamw = named_groups(optimizer.groups, members)
        return ExternalCheckpoint(
            folder=folder,
            position=external_state(
                step=optimizer.step if step is None else step,
                samples=samples,
                optimizer="adamw" if adam else "",
                # Adam's bias correction of moments without a count is that of the step.
                optimizer_step=(optimizer.step or step or 0) if adam else 0,
                param_groups=[group for group in param_groups if group["parameters"]],
                engine=engine,
                loss_scale=loss_scale,
            ),
            shapes={name: list(weights[name].shape) for name in trained},
            slots=[MASTER, *(ADAM_SLOTS if adam else ())],
            pieces=pieces,
            frozen={n: list(t.shape) for n, t in weights.items() if n not in known},
            frozen_pieces=lambda name: (weights[name],),
            tied={alias: name for alias, name in tied.items() if name in known},
            lost=[*lost, *_list_unread(optimizer, weights, trained, number_of), *unlike_adamw],
            numbered=NumberedWeights(optimizer, of_names),
        )

    of_names = name
    if names := optimizer.find_names(weights):
        optimizer.check(folder, names, weights)
    return name(names, names or ())


def _list_unread(
    optimizer: TorchOptimizer, weights: Weights, trained: list[str], number_of: dict[str, int]
) -> list[str]:
    """List the contents of the files that are not read."""
    sentences = []
    if optimizer.state and not number_of:
        sentences.append(
            f"the optimizer's moments: its {len(optimizer.state)} parameters in "
            f"{len(optimizer.groups)} groups have numbers, the weights {len(weights)} names, and "
            "neither shapes nor param_groups tell which is which; `names` of "
            "resume_from_checkpoint does"
        )
    if unlike := sorted(map(str, optimizer.keys - set(ADAM_SLOTS))):
        sentences.append(f"the optimizer's {', '.join(unlike)}: only Adam's moments are kept")
    for name, number in number_of.items():
        if optimizer.state and number not in optimizer.state:  # torch also starts with zeros
            sentences.append(f"{name} never had a gradient: its moments are zero")
    rounded = sorted({str(weights[name].dtype) for name in trained} - {"torch.float32"})
    if rounded:
        sentences.append(f"weights were saved as {', '.join(rounded)}: fp32 masters are not there")
    return sentences


def named_groups(
    groups: Sequence[Mapping[str, Any]],
    names: Sequence[Sequence[str]],
    where: Path | str = "the optimizer's state",
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return param groups with names instead of numbers, and sentences on deviations from AdamW.

    Args:
        groups: The groups of a torch optimizer.
        names: The parameters of each group.
        where: Their file, for messages.

    Raises:
        PipelineError: as group_values.
    """
    named: list[dict[str, Any]] = []
    lost: list[str] = []
    for number, (group, parameters) in enumerate(zip(groups, names, strict=False)):
        kept = {"parameters": list(parameters), **group_values(group, number, where)}
        named.append(kept)
        if group.get("decoupled_weight_decay") is False and kept.get("weight_decay"):
            lost.append(
                f"param group {number}: Adam's weight decay {kept['weight_decay']} was part of the "
                "gradient; AdamW's is not"
            )
        if group.get("amsgrad"):
            lost.append(f"param group {number}: amsgrad's largest second moment")
    return named, lost
