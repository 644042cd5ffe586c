"""Mapping of another program's names to the model's: remove prefixes, replace numbers by names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from zerotrain.errors import PipelineError
from zerotrain.state.external.checkpoint import ExternalCheckpoint
from zerotrain.state.external.order import ModelOrder, find_order
from zerotrain.state.position import ADAM_SLOTS

HINT = "base, lora and frozen_parameters have to describe the model of the checkpoint"


def fit(
    checkpoint: ExternalCheckpoint,
    trained: Mapping[str, list[int]],
    base: Callable[[str], torch.Tensor | None],
    *,
    order: ModelOrder | None = None,
) -> ExternalCheckpoint:
    """Give the checkpoint the names of the model that is to be trained.

    Trainers wrap the model, which adds a prefix to names (`module.`, `pipe.dit.`, `_orig_mod.`);
    and torch's optimizers number the parameters, in the model's order.

    Args:
        checkpoint: The result of open_external.
        trained: Shapes of the model's trained parameters, in the model's order.
        base: Returns the base model's tensor by name, or None.
        order: How the numbers of a torch optimizer map to parameters; default: to the trained
            parameters, in the model's order.

    Raises:
        PipelineError: a trained parameter is missing from the checkpoint, was not trained in it, or
            has another shape; or a frozen parameter differs from the base's.
    """
    prefix = find_prefix({*checkpoint.shapes, *checkpoint.frozen, *checkpoint.tied}, trained)

    def name_in_file(name: str) -> str:
        # Tied parameters have one name here and may have another in the checkpoint.
        return tied.get(prefix + name, prefix + name)

    tied = checkpoint.tied
    if checkpoint.numbered is not None:
        optimizer, order = checkpoint.numbered.optimizer, order or ModelOrder(module=trained)
        names = None
        if optimizer.keys.issuperset(ADAM_SLOTS):
            order = replace(order, names=order.names or optimizer.own_names)
            names = find_order(optimizer, trained, order.without_prefix(prefix), checkpoint.folder)
        checkpoint = checkpoint.numbered.name(
            names and [name_in_file(name) for name in names], list(map(name_in_file, trained))
        )
    own = {name_in_file(name): name for name in trained}
    for theirs, name in own.items():
        if checkpoint.shapes.get(theirs) != trained[name]:
            raise PipelineError(
                f"{checkpoint.folder}: {theirs} has shape "
                f"{checkpoint.shapes.get(theirs, 'none: it was not trained there')}, the model's "
                f"{name} {trained[name]}",
                hint=HINT,
            )
    if surplus := [name for name in checkpoint.shapes if name not in own]:
        raise PipelineError(
            f"{checkpoint.folder}: {surplus[0]} and {len(surplus) - 1} more parameters were "
            "trained there, and are not here",
            hint=HINT,
        )
    unknown = _check_frozen(checkpoint, prefix, base)
    name_of = {name: theirs for theirs, name in own.items()}
    pieces = checkpoint.pieces
    return replace(
        checkpoint,
        shapes=dict(trained),
        pieces=lambda name, slot: pieces(name_of[name], slot),
        lost=[*checkpoint.lost, *unknown],
        position=replace(
            checkpoint.position,
            param_groups=[_rename(g, own) for g in checkpoint.position.param_groups],
        ),
    )


def find_prefix(names: Iterable[str], trained: Mapping[str, list[int]]) -> str:
    """Find the prefix of the model's names in the checkpoint."""
    known = set(names)
    first = next(iter(trained))
    for name in sorted(known, key=len):
        prefix = name.removesuffix(first)
        if name.endswith(first) and all(prefix + other in known for other in trained):
            return prefix
    missing = next((name for name in trained if name not in known), first)
    raise PipelineError(
        f"the checkpoint has no parameter {missing}; it has {', '.join(sorted(known)[:3])}, ...",
        hint=HINT,
    )


def _check_frozen(
    checkpoint: ExternalCheckpoint, prefix: str, base: Callable[[str], torch.Tensor | None]
) -> list[str]:
    """Check that the base has the frozen values of the checkpoint; name what it does not have."""
    unknown = []
    for there in checkpoint.frozen:
        # An adapter wraps its layers.
        name = there.removeprefix(prefix).replace(".base_layer.", ".")
        expected = base(name)
        if expected is None:
            unknown.append(there)
            continue
        tensor = checkpoint.frozen_tensor(there)
        if not torch.equal(expected.to(tensor.dtype), tensor):
            raise PipelineError(
                f"{checkpoint.folder}: {there} was frozen there, with other values than the base's "
                f"{name}",
                hint="name the base that this training began with",
            )
    if not unknown:
        return []
    more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
    return [f"{unknown[0]}{more}: not trained here, and not in the base"]


def _rename(group: Mapping[str, Any], own: Mapping[str, str]) -> dict[str, Any]:
    return {**group, "parameters": [own[n] for n in group["parameters"] if n in own]}
